"""The catalogue of settings, and what `covey config explain` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.cli.settings import main_config
from covey.config import all_keys
from covey.config.explain import explain
from covey.config.settings import algorithm_settings, schema_settings
from covey.errors import InputError

# Every native key. A change here is a change of what people type: make it on purpose.
NATIVE = """
agent.browsers agent.chromium agent.pages_per_browser
agent.command agent.environment agent.environment_options agent.format agent.keep_images agent.max_response_tokens
agent.max_seconds
agent.max_tool_tokens agent.max_turns agent.name agent.opponent_options agent.opponents
agent.template agent.tool_options agent.tool_seconds agent.tools agent.train_modules agent.train_roles
cluster.address cluster.learner_devices cluster.max_restarts cluster.name cluster.nodes
cluster.rollout_devices cluster.transport
critic.clip critic.grad_clip critic.lr critic.model critic.shared critic.shared_coef critic.warmup_steps
data.name data.options data.sampler data.sampler_options data.shuffle data.system_prompt data.train_batch_size
data.train_files data.train_size data.val_files data.val_size
eval.after eval.batch_size eval.before eval.every eval.max_tokens eval.min_p eval.modes eval.n eval.temperature
eval.top_k eval.top_p
gateway.max_programs gateway.port
learner.beta1 learner.beta2 learner.entropy_coef learner.epochs learner.eps learner.grad_clip learner.lr
learner.compile learner.max_skipped learner.micro_batch_size learner.micro_batch_tokens learner.min_lr_ratio
learner.mini_batch_size learner.offload_optimizer learner.offload_reference learner.offload_weights learner.parallel
learner.optimizer learner.replay_routing learner.schedule learner.tensor_parallel learner.warmup_steps
learner.weight_decay
logging.episodes_per_step logging.experiment logging.notes logging.output_dir logging.project logging.tags logging.to
logging.verbosity
loop.keep_best loop.keep_last loop.max_minutes loop.save_every loop.save_final loop.threads loop.total_epochs
loop.total_steps
mode.max_staleness mode.max_uses mode.name mode.publish_every mode.update
model.context_length model.device model.dtype model.freeze_vision model.gradient_checkpointing model.lora.alpha
model.lora.part model.lora.rank model.lora.target_modules model.max_pixels model.min_pixels model.name
model.quantization model.trust_remote_code
resume
reward.name reward.only_if reward.options reward.seconds reward.weights
rollout.devices rollout.eager rollout.group_size rollout.max_sequences rollout.max_tokens rollout.memory rollout.min_p
rollout.name rollout.sleep rollout.stop rollout.temperature rollout.tensor_parallel rollout.top_k rollout.top_p
sandbox.allow_weak sandbox.max_concurrent sandbox.memory_mb sandbox.seconds sandbox.tier
seed
teacher.alone teacher.api_key_env teacher.coef teacher.discount teacher.dtype teacher.kl teacher.name
teacher.prompt_template teacher.top_k teacher.url
"""


def test_the_native_keys_are_these_and_few(algorithms):
    assert sorted(schema_settings()) == sorted(NATIVE.split())
    assert len(schema_settings()) <= 153  # besides the chosen algorithm's own


def test_every_native_setting_is_explained():
    assert [key for key, setting in schema_settings().items() if not setting.explanation] == []


def test_a_setting_is_read_from_its_field(algorithms):
    setting = all_keys(algorithms)["learner.lr"]
    assert (setting.type, setting.default, setting.algorithms) == ("float", 1e-5, ())
    assert setting.explanation == "learning rate after the warm-up"
    beta = all_keys(algorithms)["algorithm.beta"]
    assert (beta.type, beta.default, beta.algorithms) == ("float", 0.1, ("gvpo", "dgdo", "online_dpo"))
    assert beta.explanation == "strength of the KL constraint"
    assert all_keys(algorithms)["algorithm.name"].algorithms == tuple(algorithms)
    assert algorithm_settings("grpo", algorithms)["algorithm.name"].default == "grpo"


def test_explain_a_setting(algorithms):
    text = explain("learner.lr", algorithms)
    assert text == (
        "learner.lr\n"
        "  learning rate after the warm-up\n"
        "  type     float\n"
        "  default  1e-05\n"
        "  allowed  a number from 0 to 10\n"
        "  aliases  actor_rollout_ref.actor.optim.lr, actor.optim.lr, optimizer.lr, learning_rate"
    )
    assert explain("optimizer.lr", algorithms) == text


def test_explain_an_algorithms_setting_by_any_of_its_names(algorithms):
    text = explain("algorithm.beta", algorithms)
    assert text.startswith("algorithm.beta  (gvpo)\n  strength of the KL constraint\n")
    assert "aliases  algorithm.gvpo_beta" in text
    assert "algorithm.beta  (dgdo)\n  share of the old weights kept each step\n" in text
    assert explain("gvpo_beta", algorithms) == text.split("\n\n")[0]


def test_explain_an_algorithm(algorithms):
    lines = explain("algorithm=gvpo", algorithms).splitlines()
    assert lines[0] == "algorithm=gvpo"
    named = [line.split("=")[0].strip() for line in lines if line.startswith("  algorithm.")]
    assert named == [
        f"algorithm.{name}"
        for name in (
            *("loss", "beta", "use_bessel_correction", "clip_weight", "normalize_weights", "reference"),
            "reference_every",
            *("overlong_buffer", "overlong_penalty", "truncated", "filter_groups", "filter_metric", "max_refills"),
        )
    ]
    assert ["algorithm.beta=0.1", "strength of the KL constraint"] in [line.split(maxsplit=1) for line in lines]


@pytest.mark.parametrize(("other", "name"), [("gae", "ppo"), ("reinforce++", "reinforce_plus_plus")])
def test_explain_an_algorithm_by_its_other_name(algorithms, other, name):
    assert explain(f"algorithm={other}", algorithms) == explain(f"algorithm={name}", algorithms)


def test_explain_an_algorithm_with_another_loss(algorithms):
    lines = explain("algorithm=grpo", algorithms, "gspo").splitlines()
    assert lines[0] == "algorithm=grpo algorithm.loss=gspo"
    heads = [line.split()[0] for line in lines[1:]]
    assert {"algorithm.loss=gspo", "algorithm.clip_low=0.0003", "algorithm.std_normalize=true"} <= set(heads)
    assert not any(head.startswith("algorithm.dual_clip") for head in heads)
    with pytest.raises(InputError, match=r"algorithm\.loss=gvpo does not go with algorithm=grpo"):
        explain("algorithm=grpo", algorithms, "gvpo")


def test_the_command_explains_an_algorithm_with_another_loss(algorithms, capsys):
    assert main_config(["explain", "algorithm=grpo", "algorithm.loss=gspo"]) == 0
    assert capsys.readouterr().out == explain("algorithm=grpo", algorithms, "gspo") + "\n"


def test_what_many_algorithms_share_is_explained_once(algorithms):
    (block,) = explain("algorithm.kl_coef", algorithms).split("\n\n")
    others = len(algorithms) - 5  # gvpo and online_dpo have none, three are named
    assert block.startswith(f"algorithm.kl_coef  (grpo, dr_grpo, dapo and {others} more)\n")
    assert block.endswith(" algorithm.NAME_kl_coef")
    heads = [text.splitlines()[0] for text in explain("algorithm.clip_low", algorithms).split("\n\n")]
    owners = ("gspo, luspo", "cispo", "gmpo", "dppo", "clip_cov")
    assert heads[1:] == [f"algorithm.clip_low  ({names})" for names in owners]


def test_every_setting_of_every_algorithm_with_every_loss_is_explained(algorithms):
    for name, schema in algorithms.items():
        for other in (schema, *schema.losses.values()):
            for key, setting in algorithm_settings(name, {name: other}).items():
                assert setting.explanation, f"{key} of {name}"


def test_the_page_of_all_settings_is_what_the_command_writes(capsys):
    assert main_config(["explain", "--markdown"]) == 0
    page = capsys.readouterr().out
    write_it = "covey config explain --markdown > docs/settings.md"
    assert (Path(__file__).parents[2] / "docs" / "settings.md").read_text() == page, write_it
    assert "| `learner.lr` | `1e-05` | a number from 0 to 10 | learning rate after the warm-up |" in page
    assert "| `algorithm.beta` | dgdo | a number from 0 to 1 | share of the old weights kept each step |" in page
    assert [key for key in schema_settings() if f"| `{key}` |" not in page] == []


def test_explain_a_section_and_everything(algorithms):
    lines = explain("gateway", algorithms).splitlines()
    assert lines[0] == "gateway" and lines[1].startswith("  gateway.port=9999        port of agent=gateway")
    everything = explain("", algorithms)
    for key in all_keys(algorithms):
        assert f"  {key}=" in everything or key == "algorithm.name"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("critic.model.path", "aliases  critic.model.path"),
        ("agent.use_agent", "determines agent.name and agent.tools: false: agent=chat, without tools"),
        ("agent.backend", "accepted; no effect"),
        ("agentflow.port", "aliases  agentflow.port"),
        ("train.optim_batch_size", "determines learner.mini_batch_size: turns / rollout.group_size"),
        ("reward.weights.exact", "reward.weights\n  by reward name"),
    ],
)
def test_explain_keys_that_are_no_settings_of_ours(algorithms, key, text):
    assert text in explain(key, algorithms)


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("learner.lrr", "unknown setting  learner.lrr\n  did you mean   learner.lr"),
        ("algorithm=gvp", "unknown algorithm  gvp\n  did you mean   gvpo?"),
        ("lerner", "unknown setting  lerner\n  did you mean   learner?\n"),
    ],
)
def test_explain_an_unknown_key(algorithms, key, error):
    with pytest.raises(InputError) as caught:
        explain(key, algorithms)
    assert str(caught.value).startswith(error)
