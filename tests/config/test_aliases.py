"""The vocabularies people arrive with."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path

import pytest

from covey.config import compose
from covey.config.aliases import ALIASES, no_effect, translate
from covey.config.derive import PARTS, UNSUPPORTED_KEYS
from covey.config.settings import find, schema_settings, sections
from covey.errors import InputError

ROOTS = (
    "agent algorithm actor_rollout_ref trainer data critic env train optimizer policy model inference_model ref_model "
    "train_model rollout agentflow filter_groups val_kwargs"
)
NOT_KEYS = {"optimizer.step", "trainer.train_step", "train.json", "env.example"}  # code and file names


def get(config: object, key: str) -> object:
    return reduce(getattr, key.split("."), config)


# --- every word is known -----------------------------------------------------------------------------------------


def test_every_key_of_the_source_documents_is_known(shared: Path, algorithms):
    text = "\n".join(path.read_text() for path in sorted((shared / "seeds").glob("*.txt")))
    found = set(re.findall(rf"(?<![\w./])((?:{ROOTS.replace(' ', '|')})(?:\.[A-Za-z_]\w*)+)", text)) - NOT_KEYS
    assert len(found) > 80
    assert [key for key in sorted(found) if translate(key, algorithms) is None] == []


@pytest.mark.parametrize("spelling", sorted(ALIASES))
def test_every_alias_leads_somewhere(spelling, algorithms):
    target = ALIASES[spelling]
    native = find(target, schema_settings()) or any(
        target.removeprefix("algorithm.") in vars_of(a) for a in algorithms.values()
    )
    assert native or target in PARTS or target in UNSUPPORTED_KEYS or no_effect(target)


def vars_of(cls: type) -> set[str]:
    return set(cls.__dataclass_fields__) if hasattr(cls, "__dataclass_fields__") else set()


def test_parts_lead_to_native_settings(algorithms):
    for targets, _ in PARTS.values():
        assert all(translate(target, algorithms).key == target for target in targets)


@pytest.mark.parametrize("key", sorted(schema_settings()))
def test_no_alias_hides_a_native_setting(key, algorithms):
    assert translate(key, algorithms).key == key


def test_section_words_mean_their_names(algorithms):
    named = {section for section, has_name in sections().items() if has_name}
    assert named == {"model", "data", "agent", "reward", "algorithm", "rollout", "cluster", "mode", "teacher"}
    assert {translate(section, algorithms).key for section in named} == {f"{section}.name" for section in named}


# --- what each word means ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("algorithm.gvpo_beta=0.15", "algorithm.beta", 0.15),
        ("gvpo_beta=0.15", "algorithm.beta", 0.15),
        ("algorithm.gvpo_use_bessel_correction=False", "algorithm.use_bessel_correction", False),
        ("algorithm.gvpo_clip_weight=5.0", "algorithm.clip_weight", 5.0),
        ("algorithm.gvpo_normalize_weights=False", "algorithm.normalize_weights", False),
        ("actor_rollout_ref.model.path=a/b", "model.name", "a/b"),
        ("agent.init_args.model_name_or_path=a/b", "model.name", "a/b"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=True", "model.gradient_checkpointing", True),
        ("actor_rollout_ref.rollout.n=16", "rollout.group_size", 16),
        ("rollout.n=16", "rollout.group_size", 16),
        ("agent.num_chains=16", "rollout.group_size", 16),
        ("env.repeats=16", "rollout.group_size", 16),
        ("actor_rollout_ref.rollout.response_length=99", "rollout.max_tokens", 99),
        ("data.max_response_length=99", "rollout.max_tokens", 99),
        ("agent.max_tokens_per_turn=99", "rollout.max_tokens", 99),
        ("actor_rollout_ref.rollout.temperature=0.7", "rollout.temperature", 0.7),
        ("actor_rollout_ref.rollout.top_p=0.9", "rollout.top_p", 0.9),
        ("actor_rollout_ref.rollout.top_k=-1", "rollout.top_k", 0),
        ("actor_rollout_ref.actor.optim.lr=5e-7", "learner.lr", 5e-7),
        ("optimizer.lr=5e-7", "learner.lr", 5e-7),
        ("optimizer.weight_decay=0.01", "learner.weight_decay", 0.01),
        ("actor_rollout_ref.actor.optim.weight_decay=0.01", "learner.weight_decay", 0.01),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "learner.warmup_steps", 0),
        ("actor_rollout_ref.actor.ppo_epochs=2", "learner.epochs", 2),
        ("actor_rollout_ref.actor.grad_clip=0.5", "learner.grad_clip", 0.5),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "learner.mini_batch_size", 4),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "learner.micro_batch_size", 4),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "learner.entropy_coef", 0.01),
        ("agent.reward_name=exact", "reward.name", "exact"),
        ("agent.init_args.reward_name=exact", "reward.name", "exact"),
        ("agent.template=./my.jinja", "agent.template", "./my.jinja"),
        ("agent.init_args.template=qwen2.5", "agent.template", "qwen2.5"),
        ("agent.init_args.tools=[calculator]", "agent.tools", ["calculator"]),
        ("agent.max_turns=3", "agent.max_turns", 3),
        ("agent.init_args.agent_type=react", "agent.name", "react"),
        ("agent.agent_type=my.py:fn", "agent.name", "my.py:fn"),
        ("env.dataset=sort", "data.name", "sort"),
        ("env.AGENT_MAX_TIMEOUT=20", "agent.max_seconds", 20.0),
        ("env.VERBOSITY=DEBUG", "logging.verbosity", "debug"),
        ("data.val_batch_size=512", "eval.batch_size", 512),
        ("data.seed=7", "seed", 7),
        ("train.checkpoint_frequency=5", "loop.save_every", 5),
        ("trainer.save_freq=50", "loop.save_every", 50),
        ("trainer.save_freq=-1", "loop.save_every", 0),
        ("trainer.test_freq=-1", "eval.every", 0),
        ("trainer.val_before_train=False", "eval.before", False),
        ("trainer.total_training_steps=9", "loop.total_steps", 9),
        ("trainer.total_epochs=9", "loop.total_epochs", 9),
        ("trainer.project_name=p", "logging.project", "p"),
        ("trainer.experiment_name=e", "logging.experiment", "e"),
        ("trainer.logger=['console','wandb']", "logging.to", ["console", "wandb"]),
        ("trainer.logger=wandb", "logging.to", ["wandb"]),
        ("trainer.resume_mode=disable", "resume", "disable"),
        ("trainer.resume_from_path=runs/a", "resume", "runs/a"),
        ("val_kwargs.n=4", "eval.n", 4),
        ("val_kwargs.do_sample=True", "eval.modes", ["sampled"]),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=False", "eval.modes", ["greedy"]),
        ("actor_rollout_ref.rollout.val_kwargs.max_tokens=50", "eval.max_tokens", 50),
        ("train_model.lora.r=16", "model.lora.rank", 16),
    ],
)
def test_a_foreign_word_sets_ours(run, word, key, value):
    composed = run(word)
    assert get(composed.config, key) == value
    assert composed.warnings == ()


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("policy.kl_coef=0.1", "kl_coef", 0.1),
        ("train.kl_to_ref_coeff=0.1", "kl_coef", 0.1),
        ("actor_rollout_ref.actor.clip_ratio_low=0.1", "clip_low", 0.1),
        ("actor_rollout_ref.actor.clip_ratio_high=0.3", "clip_high", 0.3),
        ("clip_ratio_high=0.3", "clip_high", 0.3),
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "aggregation", "token-mean"),
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl", "kl_estimator", "low_var_kl"),
    ],
)
def test_a_foreign_word_sets_grpos(run, word, key, value):
    composed = run("algorithm.adv_estimator=grpo", word)
    assert getattr(composed.config.algorithm, key) == value
    assert composed.warnings == ()


# --- settings that several words make ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "coefficient"),
    [
        (["actor_rollout_ref.actor.use_kl_loss=True"], 0.001),
        (["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.05"], 0.05),
        (["actor_rollout_ref.actor.use_kl_loss=False", "actor_rollout_ref.actor.kl_loss_coef=0.05"], 0.0),
        (["actor_rollout_ref.actor.use_kl_loss=True", "algorithm.kl_coef=0.2"], 0.2),
    ],
)
def test_the_kl_coefficient_counts_if_the_kl_loss_is_used(run, words, coefficient):
    composed = run("algorithm=grpo", *words)
    assert composed.config.algorithm.kl_coef == coefficient
    assert composed.warnings == ()


def test_the_kl_coefficient_alone_has_no_effect(run):
    composed = run("algorithm=grpo", "actor_rollout_ref.actor.kl_loss_coef=0.05")
    assert composed.config.algorithm.kl_coef == 0.0
    assert composed.warnings == (
        "actor_rollout_ref.actor.kl_loss_coef has no effect without actor_rollout_ref.actor.use_kl_loss=true",
    )


def test_parts_come_together_from_different_layers(run):
    file = "actor_rollout_ref.actor.use_kl_loss: True\nactor_rollout_ref.actor.kl_loss_coef: 0.01"
    assert run("algorithm=grpo", "actor.kl_loss_coef=0.1", file=file).config.algorithm.kl_coef == 0.1
    assert run("algorithm=grpo", "algorithm.kl_coef=0.2", file=file).config.algorithm.kl_coef == 0.2
    assert run("actor.use_kl_loss=False", file="algorithm: {name: grpo, kl_coef: 0.2}").config.algorithm.kl_coef == 0.0


def test_a_switch_and_a_setting_that_disagree(run):
    with pytest.raises(InputError, match=r"disagree\n  algorithm.kl_coef=0.2.*\n  actor.use_kl_loss=false"):
        run("algorithm=grpo", file="algorithm.kl_coef: 0.2\nactor.use_kl_loss: False")
    later = run("algorithm=grpo", "algorithm.kl_coef=0.2", "actor.use_kl_loss=False")
    assert later.config.algorithm.kl_coef == 0
    assert later.warnings == ("algorithm.kl_coef=0.2 is replaced by actor.use_kl_loss=false, which comes later",)
    earlier = run("algorithm=grpo", "actor.use_kl_loss=False", "algorithm.kl_coef=0.2")
    assert earlier.config.algorithm.kl_coef == 0.2
    assert earlier.warnings == ("actor.use_kl_loss=false is replaced by algorithm.kl_coef=0.2, which comes later",)


def test_mode_sync_without_waiting_samples_while_it_learns(run):
    """As the guide describes `train.sync_iter=False`: the policy is one update old at most."""
    for words in (["mode=sync", "train.sync_iter=False"], ["train.sync_iter=False", "mode=sync"]):
        mode = run(*words).config.mode
        assert (mode.name, mode.max_staleness) == ("async", 1)
    assert run("mode=sync", "train.sync_iter=True").config.mode.name == "sync"
    assert run("mode=sync", file="train.sync_iter: false").config.mode.name == "sync"


def test_ifeval_is_trained_on_where_the_grpo_scripts_are_asked_to(run):
    data = run("env.dataset=ifeval").config.data
    assert (data.name, data.options) == ("ifeval", {"held_out": 100})
    assert run("env.dataset=ifeval", "data.options.held_out=7").config.data.options == {"held_out": 7}
    assert run("env.dataset=gsm8k").config.data.options == {}
    assert run("data=ifeval").config.data.options == {}


def test_use_agent_false_is_a_run_without_agent_and_tools(run):
    """AgentFly's agent_type and tools may stay on the command line."""
    words = ["agent.agent_type=react", "agent.tools=[calculator]"]
    for command in (["agent.use_agent=False", *words], [*words, "agent.init_args.use_agent=False"]):
        composed = run(*command)
        assert (composed.config.agent.name, composed.config.agent.tools) == ("chat", [])
        assert composed.warnings == ()
    in_recipe = run("agent.use_agent=False", config_name="agent_gsm8k").config.agent
    assert (in_recipe.name, in_recipe.tools) == ("chat", [])
    assert run("agent.use_agent=True", *words).config.agent.name == "react"
    assert run(*words, file="agent.use_agent: false").config.agent.name == "react"


@pytest.mark.parametrize("never", ["-1", "0"])
def test_verls_frequency_of_never_is_also_not_at_the_end(run, never):
    kept = run(f"trainer.save_freq={never}").config
    assert (kept.loop.save_every, kept.loop.save_final) == (0, False)
    assert (kept.eval.every, kept.eval.before, kept.eval.after) == (0, True, True)
    tested = run(f"trainer.test_freq={never}").config
    assert (tested.eval.every, tested.eval.before, tested.eval.after) == (0, True, False)
    assert tested.loop.save_final


def test_verls_other_frequencies_keep_the_end(run):
    config = run("trainer.save_freq=50", "trainer.test_freq=10", file="trainer: {save_freq: -1, test_freq: -1}").config
    assert (config.loop.save_every, config.loop.save_final) == (50, True)
    assert (config.eval.every, config.eval.after) == (10, True)
    both = run("trainer.save_freq=-1", "loop.save_final=true", "trainer.test_freq=-1", "eval.after=true").config
    assert both.loop.save_final and both.eval.after


def test_clip_ratio_gives_way_to_its_two_sides(run):
    both = run("algorithm=grpo", "actor.clip_ratio=0.1").config.algorithm
    assert (both.clip_low, both.clip_high) == (0.1, 0.1)
    one = run("algorithm=grpo", "actor.clip_ratio=0.1", "actor.clip_ratio_high=0.28").config.algorithm
    assert (one.clip_low, one.clip_high) == (0.1, 0.28)
    later = run("algorithm=grpo", "actor.clip_ratio=0.1", file="actor.clip_ratio_high: 0.28").config.algorithm
    assert (later.clip_low, later.clip_high) == (0.1, 0.1)


def test_resuming_from_a_path(run):
    assert run("trainer.resume_mode=resume_path", "trainer.resume_from_path=runs/a").config.resume == "runs/a"
    assert run("trainer.resume_mode=auto").config.resume == "auto"
    ignored = run("trainer.resume_mode=auto", "trainer.resume_from_path=runs/a")
    assert ignored.config.resume == "auto"
    assert ignored.warnings == ("trainer.resume_from_path has no effect with trainer.resume_mode=auto",)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["trainer.resume_mode=resume_path"],
            "trainer.resume_mode=resume_path needs a path\n  add trainer.resume_from_path",
        ),
        (["trainer.resume_mode=atuo"], "unknown value of trainer.resume_mode  atuo\n  did you mean   auto?"),
        (["train.optim_batch_size=1.5"], "train.optim_batch_size must be a whole number from 1, got 1.5"),
        (["train.total_dialog_turns=0"], "train.total_dialog_turns must be a whole number from 1, got 0"),
    ],
)
def test_parts_that_make_no_setting(run, words, text):
    with pytest.raises(InputError) as error:
        run(*words)
    assert str(error.value).startswith(text)


def test_dialog_turns_become_groups(run):
    composed = run(
        "env.repeats=4",
        "train.dialog_turns_per_batch=64",
        "train.optim_batch_size=32",
        "train.gradient_accumulation_steps=8",
        "train.total_dialog_turns=1000",
    )
    config = composed.config
    assert config.rollout.group_size == 4
    assert config.data.train_batch_size == 16  # 64 turns / 4
    assert config.learner.mini_batch_size == 8  # 32 turns / 4
    assert config.learner.micro_batch_size == 4  # 32 turns in 8 pieces
    assert config.loop.total_steps == 16  # 1000 turns / 64, and the last step is whole
    assert composed.warnings == ()


def test_groups_are_not_split(run):
    composed = run("rollout.group_size=8", "train.optim_batch_size=20")
    assert composed.config.learner.mini_batch_size == 3
    assert composed.warnings == (
        "train.optim_batch_size=20 is not a whole number of groups of 8: learner.mini_batch_size is 3",
    )


def test_trls_synchronised_reference_is_the_moving_reference(run):
    kept = run("algorithm=grpo", "algorithm.kl_coef=0.1", "sync_ref_model=true", "ref_model_sync_steps=7")
    assert kept.config.algorithm.reference_every == 7
    anchored = run("algorithm=gvpo", "sync_ref_model=true").config.algorithm
    assert (anchored.reference, anchored.reference_every) == ("moving", 512)
    assert run("algorithm=grpo", "sync_ref_model=false").config.algorithm.reference_every == 0
    with pytest.raises(InputError, match=r"ref_model_mixup_alpha=0\.6"):
        run("algorithm=grpo", "sync_ref_model=true", "ref_model_mixup_alpha=0.6")


# --- without effect ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "warnings"),
    [
        (["algorithm=grpo", "algorithm.gvpo_beta=1"], ["algorithm.gvpo_beta has no effect with algorithm=grpo"]),
        (["actor.clip_ratio=0.1"], ["actor.clip_ratio has no effect with algorithm=gvpo"]),
        (
            ["actor_rollout_ref.actor.clip_ratio_low=0.1", "actor_rollout_ref.actor.clip_ratio_high=0.2"],
            [
                "actor_rollout_ref.actor.clip_ratio_low has no effect with algorithm=gvpo",
                "actor_rollout_ref.actor.clip_ratio_high has no effect with algorithm=gvpo",
            ],
        ),
        (["actor.kl_loss_type=mse"], ["actor.kl_loss_type has no effect with algorithm=gvpo"]),
        (["ref_model_sync_steps=5"], ["ref_model_sync_steps has no effect without sync_ref_model=true"]),
        (
            ["critic.ppo_mini_batch_size=3", "critic.ppo_micro_batch_size_per_gpu=2"],
            [
                "critic.ppo_mini_batch_size, critic.ppo_micro_batch_size_per_gpu: no effect: the critic is "
                "trained on the policy's mini-batches, with the learner's settings"
            ],
        ),
        (
            ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4"],
            [
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu: no effect: "
                "learner.micro_batch_tokens bounds every forward pass"
            ],
        ),
        (["algorithm.gamma=0.9"], ["algorithm.gamma: no effect: gvpo does not discount"]),
        (["actor_rollout_ref.actor.strategy=fsdp2"], []),
        (
            ["actor_rollout_ref.actor.strategy=megatron"],
            [
                "actor_rollout_ref.actor.strategy: no effect: training has one backend, and learner.parallel chooses "
                "how it is sharded"
            ],
        ),
        (
            ["algorithm=reinforce_plus_plus", "algorithm.gamma=0.9", "algorithm.lam=0.5"],
            ["algorithm.lam: no effect: reinforce_plus_plus has no λ"],
        ),
        (
            ["critic.optim.weight_decay=0.1", "critic.fsdp_config.param_offload=True", "critic.nccl_timeout=1"],
            [
                "critic.optim.weight_decay, critic.fsdp_config.param_offload, critic.nccl_timeout: no effect: the "
                "critic is trained on the policy's mini-batches, with the learner's settings"
            ],
        ),
        (
            ["actor.policy_loss.loss_mode=vanilla"],
            ["actor.policy_loss.loss_mode has no effect with algorithm=gvpo"],
        ),
        (["actor.loss_scale_factor=9"], ["actor.loss_scale_factor has no effect with algorithm=gvpo"]),
        (
            [
                "algorithm.rollout_correction.rollout_is=null",
                "algorithm.rollout_correction.rollout_is_threshold=2.0",
            ],
            ["algorithm.rollout_correction.rollout_is_threshold has no effect with algorithm=gvpo"],
        ),
        (
            [
                "algorithm=grpo",
                "algorithm.rollout_correction.rollout_rs=token_k1",
                "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
            ],
            [
                "algorithm.rollout_correction.rollout_rs, algorithm.rollout_correction.rollout_rs_threshold: no "
                "effect: algorithm.reject_below, reject_above and reject_level set what is rejected"
            ],
        ),
        (
            ["algorithm=dapo", "reward_model.overlong_buffer.len=64"],
            ["reward_model.overlong_buffer.len has no effect without reward_model.overlong_buffer.enable=true"],
        ),
        (
            ["algorithm=grpo", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2"],
            ["algorithm.kl_ctrl.type=adaptive has no effect without algorithm.use_kl_in_reward=true"],
        ),
        (["agent.backend=async_verl"], ["agent.backend: no effect: rollout= chooses the engine"]),
        (
            ["algorithm.kl_ctrl.kl_coef=0.001"],
            ["algorithm.kl_ctrl.kl_coef has no effect without algorithm.use_kl_in_reward=true"],
        ),
        (
            ["train.buffer_size=64"],
            ["train.buffer_size: no effect: mode=async with mode.max_uses reuses earlier groups"],
        ),
        (
            ["agentflow.port=9999"],
            ["agentflow.port has no effect with agent=chat: only agent=gateway listens on a port"],
        ),
        (["agentflow.port=9999", "agent=gateway"], []),
    ],
)
def test_what_has_no_effect_is_said(run, words, warnings):
    assert list(run(*words).warnings) == warnings


@pytest.mark.parametrize(
    "word",
    [
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "agent.use_agent=True",
        "agent.tools=[]",
        "agent.max_turns=8",
        "algorithm.gamma=1.0",
        "algorithm.lam=1.0",
        "algorithm.use_kl_in_reward=False",
        "algorithm.kl_penalty=kl",
        "algorithm.kl_ctrl.type=fixed",
        "algorithm.filter_groups.enable=False",
        "filter_groups.metric=acc",
        "filter_groups.metric=reward",
        "algorithm.rollout_correction.rollout_is=null",
        "algorithm.rollout_correction.rollout_is=none",
        "algorithm.rollout_correction.rollout_rs=null",
        "algorithm.rollout_correction.bypass_mode=False",
        "actor_rollout_ref.actor.loss_scale_factor=null",
        "policy.kl_coef='0'",
        "policy.kl_coef=0",
        "train.sync_iter=True",
        "train.kl_coef_in_loss=True",
        "train.kl_to_inference_coeff=0.0",
        "trainer.critic_warmup=0",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "train_model.num_devices=1",
        "mode=sync",
    ],
)
def test_values_that_mean_off_are_accepted_silently(run, word):
    composed = run(word)
    assert composed.warnings == ()
    assert composed.config == run().config


def test_gvpo_refuses_an_external_kl_loss(run):
    for word in ("actor_rollout_ref.actor.use_kl_loss=True", "policy.kl_coef=0.1"):
        with pytest.raises(
            InputError, match=r"breaks GVPO's zero sum: the KL is inside its weights \(algorithm.beta\)"
        ):
            run(word)


def test_gvpo_refuses_importance_weights(run):
    with pytest.raises(
        InputError, match=r"rollout_is does not go with algorithm=gvpo\n  importance weights would break"
    ):
        run("algorithm.rollout_correction.rollout_is=token")


def test_an_algorithm_without_kl_refuses_it_too(algorithms):
    bare = {"gvpo": algorithms["gvpo"], "other": type("Other", (algorithms["gvpo"],), {"reasons": {}})}
    with pytest.raises(InputError, match="does not go with algorithm=other\n  other has no such term"):
        compose(["algorithm=other", "policy.kl_coef=0.1"], algorithms=bare)


# --- several words, one setting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("algorithm.adv_estimator=gae", {"name": "ppo", "loss": "ppo_clip"}),
        ("algorithm=reinforce++", {"name": "reinforce_plus_plus"}),
        ("algorithm=ppo algorithm.gamma=0.9 algorithm.lam=0.5", {"gamma": 0.9, "lam": 0.5}),
        ("algorithm=dgdo algorithm.dgdo_beta=0.8", {"beta": 0.8}),
        ("algorithm=dgdo algorithm.importance_priors.right=2", {"importance_priors": {"right": 2.0}}),
        ("algorithm=grpo algorithm.filter_groups.enable=True filter_groups.metric=acc", {"filter_groups": True}),
        ("algorithm=grpo filter_groups.metric=right", {"filter_metric": "right"}),
        ("algorithm=grpo train.kl_to_inference_coeff=0.01", {"kl_old_coef": 0.01}),
        ("algorithm=grpo train.kl_to_ref_coeff=0.1 train.kl_coef_in_loss=False", {"kl_coef": 0.1, "kl_in": "reward"}),
        ("algorithm=grpo algorithm.use_kl_in_reward=True", {"kl_coef": 0.001, "kl_in": "reward"}),
        (
            "algorithm=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=abs algorithm.kl_ctrl.type=adaptive "
            "algorithm.kl_ctrl.kl_coef=0.2 algorithm.kl_ctrl.target_kl=0.3 algorithm.kl_ctrl.horizon=500",
            {"kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "abs", "kl_target": 0.3, "kl_horizon": 500.0},
        ),
        ("algorithm=rloo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive", {"kl_target": 0.1}),
        ("algorithm=grpo algorithm.norm_adv_by_std_in_grpo=False", {"std_normalize": False}),
        (
            "algorithm=grpo reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64",
            {"overlong_buffer": 64.0},
        ),
        ("algorithm=grpo actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", {"loss": "ppo_clip"}),
        ("algorithm=grpo algorithm.rollout_correction.rollout_is=sequence", {"correction": "sequence"}),
        ("algorithm=grpo algorithm.rollout_correction.rollout_is=null", {"correction": "none"}),
        ("algorithm.adv_estimator=grpo_vectorized", {"name": "grpo"}),
        ("algorithm.adv_estimator=rloo_vectorized", {"name": "rloo"}),
        ("algorithm=dapo filter_groups.metric=reward", {"filter_metric": None}),
        ("algorithm=dapo algorithm.filter_groups.max_num_gen_batches=0", {"max_refills": 1000}),
        ("algorithm=dapo algorithm.filter_groups.max_num_gen_batches=7", {"max_refills": 7}),
        ("algorithm=dr_grpo actor_rollout_ref.actor.loss_scale_factor=512", {"norm_length": 512}),
        (
            "algorithm=grpo reward.reward_kwargs.overlong_buffer_cfg.enable=True "
            "reward.reward_kwargs.overlong_buffer_cfg.len=64 "
            "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
            {"overlong_buffer": 64.0, "overlong_penalty": 0.5},
        ),
        (
            "algorithm=grpo algorithm.use_kl_in_reward=true algorithm.kl_penalty=kl actor.kl_loss_type=low_var_kl",
            {"kl_in": "reward", "kl_estimator": "kl"},
        ),
        ("algorithm=grpo algorithm.use_kl_in_reward=true actor.kl_loss_type=mse", {"kl_estimator": "auto"}),
        ("algorithm=grpo algorithm.use_kl_in_reward=false actor.kl_loss_type=mse", {"kl_estimator": "mse"}),
        ("algorithm=grpo actor.use_kl_loss=true actor.kl_loss_type=mse", {"kl_in": "loss", "kl_estimator": "mse"}),
    ],
)
def test_words_about_the_algorithm(run, words, expected):
    config = run(*words.split()).config
    assert {key: getattr(config.algorithm, key) for key in expected} == expected


def test_a_kl_goes_into_the_reward_or_into_the_loss(run):
    both = ("algorithm=grpo", "algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.use_kl_loss=True")
    with pytest.raises(InputError, match="in the reward or in the loss: give one of them"):
        run(*both)
    with pytest.raises(InputError, match="breaks GVPO's zero sum"):
        run("algorithm=gvpo", "algorithm.use_kl_in_reward=True")


def test_a_limit_for_each_turn_makes_the_response_length_the_episodes(run):
    both = run("agent.max_tokens_per_turn=64", "actor_rollout_ref.rollout.response_length=256").config
    assert (both.rollout.max_tokens, both.agent.max_response_tokens) == (64, 256)
    alone = run("actor_rollout_ref.rollout.response_length=256").config
    assert (alone.rollout.max_tokens, alone.agent.max_response_tokens) == (256, None)


def test_trls_words(algorithms):
    """16 × 2 completions, 4 for each prompt, are 8 prompts."""
    words = ["algorithm=grpo", "num_generations=4", "per_device_train_batch_size=16", "gradient_accumulation_steps=2"]
    words += ["learning_rate=2e-5", "beta=0.04", "epsilon=0.1", "epsilon_high=0.3", "loss_type=dr_grpo"]
    words += ["scale_rewards=batch", "report_to=[tensorboard]", "use_vllm=false", "max_steps=7"]
    config = compose(words, algorithms=algorithms).config
    assert (config.rollout.group_size, config.data.train_batch_size, config.rollout.name) == (4, 8, "embedded")
    assert (config.learner.lr, config.loop.total_steps, config.logging.to) == (2e-5, 7, ["console", "tensorboard"])
    own = config.algorithm
    assert (own.kl_coef, own.clip_low, own.clip_high, own.aggregation) == (0.04, 0.1, 0.3, "seq-mean-token-sum-norm")
    assert (own.std_normalize, own.std_over) == (True, "batch")
    assert (
        compose(["algorithm=grpo", "scale_rewards=none"], algorithms=algorithms).config.algorithm.std_normalize is False
    )


def test_completions_that_are_not_whole_groups_are_reported(algorithms):
    """8 completions, TRL's default, of 5 each are 2 prompts."""
    composed = compose(["algorithm=grpo", "num_generations=5", "gradient_accumulation_steps=1"], algorithms=algorithms)
    assert composed.config.data.train_batch_size == 2
    assert any("not whole groups of 5" in warning for warning in composed.warnings)
