"""Images in groups of checkpoints, under new weights, in agent=flow and through the gateway."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import covey
from covey.agents.flow import FlowAgent
from covey.agents.resolve import FunctionAgent
from covey.gateway.openai_api import RequestRefused, read_message, read_messages, to_openai_content
from covey.gateway.registry import public_task
from covey.images import data_url, image_of, images_of, picture
from covey.models.image_features import vision_weights
from covey.rollout.asynchronous import group_from_json, group_to_json
from covey.rollout.rendering import Renderer
from covey.telemetry.jsonl import read_episodes
from covey.types import Episode, Failure, Group, ImageFile, ImageSpan, StopReason, Task, Turn
from tests.agents.scripted import Script, scored
from tests.agents.test_flow import CALL, PLAN, STOP, FakeTools, Scripted
from tests.vision.test_engine_and_learner import ONE, TWO, engine_for, expected, sample
from tests.vision.test_runs import SMALL, rows, vowels
from tests.vision.tiny import FAMILIES, an_image, asking, drawn, tiny_vlm, vlm_folder

# -- Groups in checkpoints ---------------------------------------------------------------------------------------------


IN_A_FILE = {"role": "user", "content": [{"type": "image", "image": ImageFile("b.png", "x")}]}


def test_a_group_keeps_its_images_each_once() -> None:
    one, two = an_image(seed=1), an_image(seed=2)
    messages = (*asking("what is ", one, "?"), {"role": "assistant", "content": "a"}, IN_A_FILE)
    spans = (ImageSpan(one, 3, 6, (2, 3)), ImageSpan(two, 12, 4))
    turn = Turn((1, 2, 3), (4,), (-1.0,), (2,), StopReason.EOS, images=spans)
    task = Task("t", tuple(asking(one)))
    failed = Episode(task, (), (), failure=Failure("browser", "crashed"))
    group = Group(task, (Episode(task, (turn, turn), messages, {"r": 1.0}, StopReason.EOS), failed))
    stored = json.loads(json.dumps(group_to_json(group)))
    assert len(stored["images"]) == 2
    found = group_from_json(task, stored)
    assert found == group
    assert [span.image.data for span in found.episodes[0].turns[0].images] == [one.data, two.data]


def returning(part: Any) -> Episode:
    """An episode of a coroutine that returns a message with this part."""

    async def agent(policy: Any, task: Task) -> Any:
        reply = await policy.chat(task.messages)
        return [*task.messages, {"role": "assistant", "content": reply}, {"role": "user", "content": [part, "?"]}]

    return asyncio.run(scored(FunctionAgent(agent), Task("t", tuple(asking("go"))), Script("a"), reward=lambda: 1.0))


def test_a_coroutine_may_return_pictures() -> None:
    image = an_image(seed=1)
    episode = returning({"type": "image", "image": picture(image)})
    (found,) = images_of(episode.messages)
    assert picture(found).tobytes() == picture(image).tobytes() and episode.rewards
    json.dumps(group_to_json(Group(episode.task, (episode,))))
    failed = returning({"type": "image", "image": object()})
    assert failed.failure is not None and failed.failure.cause == "image"


# -- New weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_new_weights_neither_features_nor_prefixes_are_reused(family: str, paged: bool) -> None:
    model, vision = tiny_vlm(family)
    renderer = Renderer(vision.tokenizer, vision=vision)
    prompts = [renderer.render(messages) for messages in (ONE, TWO)]
    engine = engine_for(model, vision, paged=paged)
    before = sample(engine, prompts)
    with torch.no_grad():
        for weight in vision_weights(model).values():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    asyncio.run(engine.publish(model, 1))
    after = sample(engine, prompts)
    engine.close()
    for prompt, one in after:
        assert set(one.versions) == {1}
        assert list(one.logprobs) == pytest.approx(expected(model, vision, prompt, one.token_ids), abs=1e-4)
    prompt, one = before[0]
    assert abs(one.logprobs[0] - expected(model, vision, prompt, one.token_ids)[0]) > 1e-3


def test_a_request_in_progress_continues_with_new_weights() -> None:
    """Tokens after the change are sampled by the new weights, and record their version."""
    model, vision = tiny_vlm("qwen3_vl")
    prompt = Renderer(vision.tokenizer, vision=vision).render(TWO)
    engine = engine_for(model, vision)

    async def play() -> Any:
        from covey.types import Sampling

        job = asyncio.create_task(engine.generate(prompt.ids, Sampling(max_tokens=40, seed=3), prompt.images))
        while engine.generated_tokens < 5:
            await asyncio.sleep(0)
        await engine.pause()
        await engine.publish(model, 1)
        await engine.resume()
        return await job

    done = asyncio.run(play())
    engine.close()
    assert set(done.versions) == {0, 1} and list(done.versions) == sorted(done.versions)
    ids = done.token_ids  # the weights are equal, so all log-probs must be those of one forward pass
    assert list(done.logprobs) == pytest.approx(plain_logprobs(model, vision, prompt, ids), abs=1e-4)


def plain_logprobs(model: Any, vision: Any, prompt: Any, ids: tuple[int, ...]) -> list[float]:
    from tests.vision.test_engine_and_learner import by_transformers
    from tests.vision.tiny import TWIN

    twin = vision.tokenizer.convert_tokens_to_ids(TWIN)
    fed = tuple(twin if token == vision.token_id else token for token in ids)
    logits = by_transformers(model, vision, prompt.ids + fed, prompt.images)[len(prompt.ids) - 1 : -1]
    found: list[float] = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
    return found


# -- agent=flow --------------------------------------------------------------------------------------------------------


class Seeing(Scripted):
    """A scripted policy that keeps the images of its prompts."""

    async def ask(self, messages: Any, **settings: Any) -> Any:
        (message,) = messages
        self.seen = [*getattr(self, "seen", []), images_of(messages)]
        text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
        return await super().ask([{**message, "content": text}], **settings)


def test_every_module_of_flow_sees_the_images() -> None:
    image = an_image(seed=1)
    task = Task("t", ({"role": "system", "content": "Be brief."}, *asking("what is ", image, "?")))
    policy = Seeing([PLAN, CALL, STOP, "a circle"])
    agent = FlowAgent(cast(Any, FakeTools()))
    episode = asyncio.run(agent.run(cast(Any, policy), task))
    assert policy.seen == [[image]] * 4
    assert all("what is ?" in prompt and "Be brief." in prompt for prompt in policy.asked[:1])
    assert episode.messages[:2] == task.messages
    opening, _ = agent.opening(task)
    assert images_of(opening) == [image]


def test_a_picture_of_a_tool_is_shown_to_the_modules_after_it() -> None:
    image = an_image(seed=2)

    class Camera(FakeTools):
        async def call(self, calls: Any) -> Any:
            return [replace(result, images=(image,)) for result in await super().call(calls)]

    policy = Seeing([PLAN, CALL, STOP, "a circle"])
    task = Task("t", tuple(asking("what is ", an_image(seed=1), "?")))
    asyncio.run(FlowAgent(cast(Any, Camera())).run(cast(Any, policy), task))
    assert [len(seen) for seen in policy.seen] == [1, 1, 2, 2]


# -- The gateway -------------------------------------------------------------------------------------------------------

PNG = f"data:image/png;base64,{base64.b64encode(drawn(seed=1)).decode()}"


def part(url: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": url}]}


def test_a_client_sends_pictures_as_data_urls() -> None:
    message = read_message(part({"url": PNG}))
    assert message["content"] == [{"type": "text", "text": "what?"}, {"type": "image", "image": an_image(seed=1)}]
    assert read_message(part(PNG)) == message
    assert to_openai_content(message["content"])[1]["image_url"]["url"] == PNG


@pytest.mark.parametrize("url", ["picture.png", "/etc/passwd", "file:///a.png", "https://a.test/b.png", 3, None])
def test_a_client_cannot_name_a_file_or_an_address(url: Any, tmp_path: Path) -> None:
    for given in (url, {"url": url}):
        with pytest.raises(RequestRefused, match="data:image/png;base64"):
            read_message(part(given))
    with pytest.raises(RequestRefused, match="data:image/png;base64"):
        read_message({"role": "user", "content": [{"type": "image", "image": str(url)}]})


def test_broken_pictures_and_pictures_of_others_are_refused() -> None:
    with pytest.raises(RequestRefused, match="neither an image file nor base64"):
        read_message(part("data:image/png;base64,%%"))
    with pytest.raises(RequestRefused, match="cut off"):
        read_message(part(PNG[:-40]))
    with pytest.raises(RequestRefused, match="users may send images"):
        read_message(part(PNG) | {"role": "system"})


def test_a_task_shows_its_pictures_as_data_urls(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(drawn(seed=1))
    task = Task("t", tuple(asking("what?", an_image(seed=1))), "a", {})
    file = replace(
        task, messages=({"role": "user", "content": [{"type": "image", "image": image_of(tmp_path / "a.png")}]},)
    )
    for each in (task, file):
        shown = json.loads(json.dumps(public_task(each)))["messages"]
        assert images_of(read_messages(shown)) == [an_image(seed=1)]
    assert data_url(an_image(seed=1)) == PNG


PROGRAM = """
import json, os, urllib.request
task = json.loads(os.environ["COVEY_TASK"])
body = {"model": "tiny", "messages": task["messages"]}
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        reply = json.load(answer)["choices"][0]["message"]
    body["messages"] += [reply, {"role": "user", "content": "and?"}]
"""


def test_a_program_behind_the_gateway_trains_with_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="the gateway's packages are not installed: pip install -e '.[serve]'")
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    model = vlm_folder(tmp_path / "model", "qwen3_vl")
    settings: dict[str, Any] = SMALL | {
        "agent": {"name": "gateway", "command": "python program.py"},
        "gateway.port": 0,
        "loop": {"total_steps": 1},
        "eval": {"before": False, "after": False},
    }
    run = covey.train(model=str(model), tasks=rows(2), reward=vowels, algorithm="grpo", **settings)
    episodes = list(read_episodes(Path(run.path) / "episodes.jsonl"))
    assert episodes
    for episode in episodes:
        kinds = [part["type"] for message in episode["messages"] for part in message["content"] if type(part) is dict]
        assert kinds.count("image") == 1  # the task's messages are not repeated
        assert len(episode["rows"]) == 1  # the second request continues the first one's tokens
    records = [json.loads(line) for line in (Path(run.path) / "metrics.jsonl").read_text().splitlines()]
    (step,) = [record["metrics"] for record in records if record["kind"] == "step"]
    assert step["episodes/failed"] == 0 if "episodes/failed" in step else True
