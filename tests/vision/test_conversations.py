"""Images in episodes of several turns: from environments and tools, kept and dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.agents.environment import EnvironmentAgent, EnvironmentFailed
from covey.agents.formats.detect import make_format
from covey.agents.render_demonstrations import render_messages
from covey.agents.tools.session import render_result
from covey.agents.tools.toolset import ToolSet, resolve_tools
from covey.agents.turns import ToolAgent, Toolbox
from covey.errors import InputError
from covey.images import images_of, picture, plain_text
from covey.rollout.policy import EpisodePolicy
from covey.rollout.rendering import Renderer
from covey.training.samples import episode_rows
from covey.types import Completion, Episode, ImageSpan, Sampling, StopReason, Task
from tests.vision.tiny import an_image, asking, drawn, tiny_vlm

TASK = Task("t", tuple(asking("find it", an_image(seed=0))))


class Scripted:
    """An engine that gives these replies, and records its prompts."""

    def __init__(self, tokenizer: Any, replies: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.replies = list(replies)
        self.prompts: list[tuple[tuple[int, ...], tuple[ImageSpan, ...]]] = []

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> Completion:
        self.prompts.append((tuple(token_ids), tuple(images)))
        ids = (*self.tokenizer(self.replies.pop(0))["input_ids"], self.tokenizer.eos_token_id)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), StopReason.EOS)


class Screens:
    """Shows a new picture after each reply."""

    def __init__(self) -> None:
        self.shown = 0

    def reset(self, task: Task) -> None:
        return None

    def step(self, reply: str) -> Any:
        self.shown += 1
        if self.shown == 3:
            return covey.Done(reward=1.0)
        return {
            "role": "user",
            "content": [{"type": "text", "text": "now "}, {"type": "image", "image": drawn(seed=self.shown)}],
        }


def play(
    agent: Any, replies: Sequence[str], family: str = "qwen2_5_vl", **options: Any
) -> tuple[Episode, Any, Scripted]:
    _, vision = tiny_vlm(family)
    engine = Scripted(vision.tokenizer, replies)
    renderer = Renderer(vision.tokenizer, vision=vision)
    policy = EpisodePolicy(engine, renderer, Sampling(), (0,), **options)  # type: ignore[arg-type]
    return asyncio.run(agent.run(policy, TASK)), vision, engine


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_screenshots_of_an_environment_extend_one_row(family: str) -> None:
    episode, vision, engine = play(EnvironmentAgent(Screens, max_turns=5), ["left", "right", "up"], family)
    (row,) = episode_rows(episode, 0)
    assert [span.image for span in row.images] == [an_image(seed=seed) for seed in (0, 1, 2)]
    assert images_of(episode.messages) == [an_image(seed=seed) for seed in (0, 1, 2)]
    ids = row.prompt_ids + row.response_ids
    for span in row.images:  # each image begins where its ids are
        expected = vision.expand([vision.token_id], [span.image])
        assert ids[span.start : span.end] == expected.ids
    # The whole row is what the template writes for the whole conversation.
    assert engine.prompts[-1] == (
        (whole := Renderer(vision.tokenizer, vision=vision).render(episode.messages[:-1])).ids,
        whole.images,
    )
    sampled = [token for token, on in zip(row.response_ids, row.mask, strict=True) if on]
    assert vision.tokenizer.decode(sampled, skip_special_tokens=True) == "leftrightup"


def test_dropping_old_screenshots_forks_the_episode() -> None:
    episode, _, engine = play(EnvironmentAgent(Screens, max_turns=5), ["left", "right", "up"], keep_images=1)
    rows = episode_rows(episode, 0)
    assert [[span.image for span in row.images] for row in rows] == [[an_image(seed=seed)] for seed in (0, 1, 2)]
    assert images_of(episode.messages) == [an_image(seed=seed) for seed in (0, 1, 2)]  # the record has them all
    assert all(len(images) == 1 for _, images in engine.prompts)


def test_keeping_enough_images_changes_nothing() -> None:
    whole, kept = (
        play(EnvironmentAgent(Screens, max_turns=5), ["left", "right", "up"], keep_images=count)[0]
        for count in (None, 3)
    )
    assert episode_rows(whole, 0) == episode_rows(kept, 0)


def test_equal_ids_with_another_image_do_not_continue_a_row() -> None:
    """Two rows whose ids continue each other, but whose pictures differ."""
    _, vision = tiny_vlm("qwen2_vl")
    renderer = Renderer(vision.tokenizer, vision=vision)
    first, other = (renderer.render(asking(an_image(seed=seed))) for seed in (1, 2))
    turns = [
        covey.types.Turn(prompt.ids + extra, (5,), (0.0,), (0,), StopReason.EOS, images=prompt.images)
        for prompt, extra in ((first, ()), (other, (5, 6)))
    ]
    assert len(episode_rows(Episode(TASK, tuple(turns), ()), 0)) == 2
    same = [turns[0], covey.types.Turn((*first.ids, 5, 6), (7,), (0.0,), (0,), StopReason.EOS, images=first.images)]
    assert len(episode_rows(Episode(TASK, tuple(same), ()), 0)) == 1


def test_a_broken_picture_of_an_environment_is_a_failure_of_the_episode() -> None:
    class Broken(Screens):
        def step(self, reply: str) -> Any:
            return {"role": "user", "content": [{"type": "image", "image": drawn()[:-20]}]}

    with pytest.raises(EnvironmentFailed, match="step: the image is cut off"):
        play(EnvironmentAgent(Broken, max_turns=5), ["left"])


# -- Tools -------------------------------------------------------------------------------------------------------------


@covey.tool
def crop(x: int) -> Any:
    """Crop the picture.

    Args:
        x: the left edge
    """
    return ["here: ", picture(an_image(seed=x))]


def test_a_tool_returns_a_picture() -> None:
    (tool,) = resolve_tools([crop]).tools
    inline = ToolSet((replace(tool, inline=True),))
    agent = ToolAgent(Toolbox(inline), make_format("hermes"), max_turns=3)
    call = '<tool_call>\n{"name": "crop", "arguments": {"x": 4}}\n</tool_call>'
    episode, _, _ = play(agent, [call, "a cat"])
    shown, text = episode.messages[-2]["content"]
    assert picture(shown["image"]).tobytes() == picture(an_image(seed=4)).tobytes() and "here: " in text["text"]
    assert len(episode.turns[-1].images) == 2


def test_a_tool_may_return_a_part_or_a_picture() -> None:
    for value in (
        {"type": "image", "image": drawn(seed=3)},
        [{"type": "text", "text": ""}, {"type": "image", "image": drawn(seed=3)}],
    ):
        output = render_result("look", value, 100)
        assert output.images == (an_image(seed=3),) and output.text == ""
    assert render_result("look", {"image": "a.png"}, 100).images == ()  # a table of the tool's own


def test_pictures_in_the_tool_results_of_demonstrations() -> None:
    call = {"function": {"name": "crop", "arguments": {"x": 1}}}
    parts = [{"type": "image", "image": an_image(seed=3)}, {"type": "text", "text": "here"}]
    messages = [
        *TASK.messages,
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "nothing"},
        {"role": "tool", "content": parts},
        {"role": "assistant", "content": "a cat"},
    ]
    schema = {"type": "function", "function": {"name": "crop", "parameters": {}}}
    for native in (True, False):  # a message for each result, or one for all
        written, _ = render_messages(messages, [schema], make_format("hermes", native_tools=native))
        assert images_of(written) == [an_image(seed=0), an_image(seed=3)]
        shown = plain_text(written[-2]["content"])
        assert shown.startswith("[image] ") and "here" in shown and ("nothing" in shown) is not native


# -- What is refused ---------------------------------------------------------------------------------------------------


def test_a_model_without_eyes_refuses_images() -> None:
    from tests.conftest import byte_tokenizer

    with pytest.raises(InputError, match="this model reads text only"):
        Renderer(byte_tokenizer()).prompt(asking("a", an_image()))


def test_render_alone_refuses_images(tmp_path: Path) -> None:
    _, vision = tiny_vlm("qwen2_vl")
    renderer = Renderer(vision.tokenizer, vision=vision)
    policy = EpisodePolicy(Scripted(vision.tokenizer, []), renderer, Sampling(), (0,))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"use policy.ask"):
        policy.render(asking(an_image()))
