"""This machine, or one of several machines that are each started by hand."""

from vitscale.ground.errors import RecipeError
from vitscale.launch.clusters import Job, shell_line
from vitscale.launch.environment import find_place
from vitscale.launch.nodes import Layout, ThisNode
from vitscale.launch.pretraining import PretrainingRanks, launch_pretraining


def render(job: Job) -> str:
    """The command of each rank of this node, with its environment.

    Other nodes are assumed to have as many ranks as this one. The port where the ranks meet is chosen when they start.
    """
    place = _place(job)
    ranks = PretrainingRanks(job.what)
    own = ranks.fitting_here()
    node, nodes, address = (place.node, place.nodes, place.address) if place else (0, 1, "127.0.0.1")
    layout = Layout(own, node * own, nodes * own, address, 0)
    lines = [f"# node {node} of {nodes}; MASTER_PORT is a free port of node 0, chosen at every start"]
    for rank in ranks.commands(layout, 0):
        lines.append(shell_line(rank.command, {**rank.environment, "MASTER_PORT": "PORT"}))
    return "\n".join(lines)


def submit(job: Job) -> int:
    """Run the job on this machine, now. Returns the exit code."""
    return launch_pretraining(job.what, _place(job), max_restarts=job.max_restarts)


def _place(job: Job) -> ThisNode | None:
    if job.options:
        raise RecipeError(f"--cluster-option {next(iter(job.options))}: --cluster local has no options")
    return find_place(job.nodes, job.node_rank, job.master, wait_s=60 * job.wait_for_nodes_minutes)
