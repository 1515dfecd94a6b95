"""Two players in one episode: the same model plays both sides of a game and learns from each side's result.

    python examples/two_players.py

An environment with several roles names, with each observation, the role that replies (docs/agents.md). Each role has a
conversation of its own, and `covey.Done` gives each its own reward. Advantages are computed within a role: the first
player is compared with the first players of the other attempts.

The game: from a pile of counters the players take one or two in turn; who takes the last one wins. With perfect play
the first player loses from a pile of 3 and of 6 and wins from 4 and 5. The rewards of the two sum to 0, so their sum
has no signal.

With --past the second player is an earlier policy of the run, and only the first one learns.
"""

import argparse

import covey

RULES = "Take 1 or 2 counters from the pile. Who takes the last one wins. Reply with one digit."


class TakeAway:
    def reset(self, task):
        self.pile, self.player, self.started = int(task.answer), "first", set()
        return self.observe()

    def observe(self):
        """What the player to move sees."""
        rules = [] if self.player in self.started else [{"role": "system", "content": RULES}]
        self.started.add(self.player)
        return covey.Observation([*rules, {"role": "user", "content": f"Pile: {self.pile}"}], role=self.player)

    def step(self, reply):
        other = "second" if self.player == "first" else "first"
        taken = {"1": 1, "2": 2}.get(reply.strip(), 0)
        if not 1 <= taken <= self.pile:
            return self.won_by(other)  # not a legal move
        self.pile -= taken
        if self.pile == 0:
            return self.won_by(self.player)
        self.player = other
        return self.observe()

    def won_by(self, winner):
        return covey.Done(reward={player: 1.0 if player == winner else -1.0 for player in ("first", "second")})

    def end(self, reason):
        """A reply that is too long loses."""
        return self.won_by("second" if self.player == "first" else "first")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a folder, a Hugging Face id, or smollm2-135m")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--past", action="store_true", help="the second player is a past policy")
    args = parser.parse_args()

    piles = [{"question": f"Pile: {pile}", "answer": str(pile)} for pile in (3, 4, 5, 6)]
    run = covey.train(
        model=args.model,
        tasks=piles,
        validation=piles,
        algorithm="grpo",
        agent=TakeAway,
        **({"agent.opponents": ["second"], "agent.opponent_options.every": 2} if args.past else {}),
        data={"train_batch_size": 4},
        rollout={"group_size": 16, "max_tokens": 3},
        learner={"lr": 3e-5},
        eval={"modes": ["sampled"], "n": 16},
        loop={"total_steps": args.steps},
    )
    for step, metrics in run.evaluations:
        print(f"after {step} steps: reward of the first player {metrics['eval/sampled/given/first']:+.2f}")
