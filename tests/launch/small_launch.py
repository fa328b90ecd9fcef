"""One node's launch, whose ranks are those of small_ranks.py:

    python small_launch.py NODE NODES PORT RUN_DIR RANKS WAIT_SECONDS BODY [BODY ...]

A body a rank of this node for each attempt; the last one repeats. The body finds its rank's environment as usual.
"""

import sys
from pathlib import Path

from small_ranks import ranks

from vitscale.ground.errors import VitscaleError
from vitscale.launch import FirstNode, Launch, OtherNode, RankCommand, Supervisor, ThisNode


def main() -> int:
    node, nodes, port, run_dir, count, wait, *bodies = sys.argv[1:]
    place = ThisNode(int(node), int(nodes), "127.0.0.1", int(port), float(wait))
    with Supervisor(grace_s=0.5) as supervisor:
        others = (
            FirstNode(place, None, supervisor, Path(run_dir), silence_s=1.5)
            if place.node == 0
            else OtherNode(place, supervisor, Path(run_dir), silence_s=1.5)
        )

        def prepare(attempt: int) -> list[RankCommand]:
            layout = others.meet(int(count), is_asked_for=True)
            if layout is None:
                return []
            found = ranks(Path(run_dir), *[bodies[min(attempt, len(bodies) - 1)]] * layout.ranks)
            world = {"WORLD_SIZE": str(layout.world_size), "MASTER_PORT": str(layout.port)}
            numbered = ((one, one.rank + layout.first_rank) for one in found)
            return [
                RankCommand(rank, one.command, {**one.environment, **world, "RANK": str(rank)})
                for one, rank in numbered
            ]

        return Launch(Path(run_dir), prepare, supervisor, others, first_pause_s=0.05, max_restarts=2).run()


try:
    code = main()
except VitscaleError as error:
    print(f"error: {error}", file=sys.stderr)
    code = error.exit_code
sys.exit(code)
