"""Chat templates in the style of well-known models, cut down to how they show tools, calls and results, and what they
refuse."""

from __future__ import annotations

PLAIN = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

# Qwen2.5: results are a user's message, and results in a row share one.
HERMES = """\
{%- if tools -%}
<|im_start|>system
{% for tool in tools -%}{{ tool | tojson }}
{% endfor -%}
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == "tool" -%}
{%- if messages[loop.index0 - 1].role != "tool" -%}{{- "<|im_start|>user" -}}{%- endif -%}
{{- "\\n<tool_response>\\n" + m.content + "\\n</tool_response>" -}}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}{{- "<|im_end|>\\n" -}}{%- endif -%}
{%- else -%}
{{- "<|im_start|>" + m.role + "\\n" + m.content -}}
{%- for call in m.tool_calls or [] -%}
{%- if m.content or not loop.first -%}{{- "\\n" -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}{{- "}\\n</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}"""

# Qwen3: thinking is dropped from replies before the last question; a result is no question.
FORGETFUL = """\
{#- <tool_call> -#}
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}
{%- if m.role == "user" and not (m.content.startswith("<tool_response>") and m.content.endswith("</tool_response>")) -%}
{%- set ns.last = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- set content = m.content.split("</think>")[-1] if loop.index0 < ns.last else m.content -%}
{{- "<|im_start|>" + m.role + "\\n" + content + "<|im_end|>\\n" -}}
{%- endfor -%}"""

# Llama 3.1: one call in a reply at most, and no text beside it; tools stand in the first question.
LLAMA = """\
{%- for m in messages -%}
{%- if "tool_calls" in m -%}
{%- if m.tool_calls | length != 1 -%}
{{- raise_exception("This model only supports single tool-calls at once!") -}}
{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' -}}
{{- call.arguments | tojson -}}{{- "}<|eot_id|>" -}}
{%- elif m.role in ("tool", "ipython") -%}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (m.content | tojson) + "<|eot_id|>" -}}
{%- else -%}
{{- "<|start_header_id|>" + m.role + "<|end_header_id|>\\n\\n" -}}
{%- if tools and loop.first -%}{%- for tool in tools -%}{{- tool | tojson -}}{{- "\\n\\n" -}}{%- endfor -%}{%- endif -%}
{{- (m.content | trim) + "<|eot_id|>" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" -}}{%- endif -%}"""

# Mistral 7B v0.3: roles alternate but for calls and results, ids have nine characters, text beside a call is dropped.
MISTRAL = """\
{%- set ns = namespace(index=0) -%}
{%- for m in messages -%}
{%- if not (m.role == "tool" or m.tool_calls) -%}
{%- if (m.role == "user") != (ns.index % 2 == 0) -%}
{{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") -}}
{%- endif -%}
{%- set ns.index = ns.index + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- set questions = messages | selectattr("role", "equalto", "user") | list -%}
{%- for m in messages -%}
{%- if m.role == "user" -%}
{%- if tools and m == questions[-1] -%}
{{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" -}}
{%- endif -%}
{{- "[INST] " + m.content + "[/INST]" -}}
{%- elif m.tool_calls -%}
{{- "[TOOL_CALLS] [" -}}
{%- for call in m.tool_calls -%}
{%- if call.id is not defined or call.id | length != 9 -%}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") -}}
{%- endif -%}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ("" if loop.last else ", ") -}}
{%- endfor -%}
{{- "]</s>" -}}
{%- elif m.role == "assistant" -%}
{{- " " + (m.content | trim) + "</s>" -}}
{%- else -%}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 -%}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") -}}
{%- endif -%}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- endif -%}
{%- endfor -%}"""

# Mistral Small: name[CALL_ID]id[ARGS]{…}.
MISTRAL_ARGS = """\
{%- if tools -%}{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == "user" -%}
{{- "[INST]" + m.content + "[/INST]" -}}
{%- elif m.role == "assistant" -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- "[TOOL_CALLS]" + call.function.name + "[CALL_ID]" + call.id + "[ARGS]" + (call.function.arguments | tojson) -}}
{%- endfor -%}
{{- "</s>" -}}
{%- else -%}
{{- "[TOOL_RESULTS]" + m.tool_call_id + "[TOOL_CONTENT]" + m.content + "[/TOOL_RESULTS]" -}}
{%- endif -%}
{%- endfor -%}"""
