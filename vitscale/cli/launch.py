"""`vitscale launch`: the command line of vitscale.launch."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Exit, Option

from vitscale.cli.options import Settings

Resume = Literal["auto", "never"]
ClusterName = Literal["local", "slurm", "k8s"]


def launch(
    recipe: Annotated[str, Argument(help="A file, or the name of one that comes with vitscale.")],
    ranks: Annotated[
        int | None, Option(min=1, max=1024, help="Processes per node.", show_default="one per CUDA device; one on CPUs")
    ] = None,
    nodes: Annotated[
        int | None,
        Option(
            min=1,
            max=65536,
            help="Machines: this command runs on each of them. Under srun, this and the next two come from Slurm.",
            show_default="1",
        ),
    ] = None,
    node_rank: Annotated[int | None, Option(min=0, max=65535, help="Number of this node, from 0.")] = None,
    master: Annotated[
        str | None,
        Option(metavar="HOST[:PORT]", help="Address of node 0 for the others; its port (default 29600) must be free."),
    ] = None,
    wait_for_nodes: Annotated[
        float, Option(min=0.01, max=10**6, metavar="MINUTES", help="How long to wait for missing nodes.")
    ] = 10.0,
    run_dir: Annotated[Path | None, Option(help="The run's directory.", show_default="runs/<recipe name>")] = None,
    settings: Settings = None,
    resume: Annotated[
        Resume, Option(help="never: refuse a directory that holds a run, instead of continuing it.")
    ] = "auto",
    max_restarts: Annotated[int, Option(min=0, max=10**6, help="Most restarts in a row without a new checkpoint.")] = 3,
    time_limit: Annotated[
        float | None,
        Option(min=0.001, max=10**6, metavar="MINUTES", help="Save and end after this time, with exit code 85."),
    ] = None,
    stop_at: Annotated[
        int | None, Option(min=1, max=2**53, metavar="STEP", help="Save and end after this step.")
    ] = None,
    smoke: Annotated[
        bool, Option("--smoke", help="Try the recipe: a small model of its family, four steps, generated pictures.")
    ] = False,
    cluster: Annotated[ClusterName, Option(help="Where: this machine; a Slurm job; a Kubernetes job.")] = "local",
    cluster_options: Annotated[
        list[str] | None, Option("--cluster-option", metavar="KEY=VALUE", help="Option of this cluster: see cluster/.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would run; start nothing.")] = False,
) -> None:
    """Train what a recipe says, and restart it when something fails. Repeating the command continues a run."""
    from vitscale.launch import Pretraining
    from vitscale.launch.clusters import Job, find_cluster, read_pairs

    options = read_pairs("--cluster-option", cluster_options or [])
    where = recipe, tuple(settings or ()), run_dir, ranks
    what = Pretraining(*where, resume, time_limit_minutes=time_limit, stop_at=stop_at, smoke=smoke)
    job = Job(what, nodes, node_rank, master, max_restarts, wait_for_nodes, options)
    if not dry_run:
        raise Exit(find_cluster(cluster).submit(job))
    print(find_cluster(cluster).render(job))
