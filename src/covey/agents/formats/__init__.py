"""Tool-call formats: how a model writes tool calls, and how their results are shown to it. See docs/formats.md.

    base.py      helpers that formats share; the interface is `Format` in covey/tool_calls.py
    hermes.py, llama.py, mistral.py, react.py, code.py    one family of formats per file
    detect.py    FORMATS, the list by name; and the choice from a model's chat template
    json_repair.py    JSON with the small deviations of language models

To add a format, copy the file that is most like it. Give the class a `name`, its `stop` strings and `native_tools`;
write `instructions` (how to call tools, for the system message), `parse` (reply → calls) and `observe` (results →
messages). Add a line to FORMATS, and to `_template_format` if chat templates reveal it. Demonstrations need a line in
WRITERS of `covey.agents.render_demonstrations`. tests/agents/formats/test_round_trip.py covers every format in FORMATS.
"""
