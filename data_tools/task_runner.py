"""Runs the tasks of a plan, one per shard, and collects their reports."""

from collections.abc import Sequence
from dataclasses import dataclass

from data_tools.conversion_plan import ConversionPlan
from data_tools.finishing import refuse_rejects
from data_tools.report import ProgressDisplay
from data_tools.request import Conversion
from data_tools.shard_task import Reader, ShardReport, ShardTask
from vitscale.ground.wording import counted


@dataclass(frozen=True)
class TaskRunner:
    """Runs the tasks of a plan.

    Attributes:
        conversion: what is converted.
        plan: its plan.
        reader: what images are read from.
    """

    conversion: Conversion
    plan: ConversionPlan
    reader: Reader

    def run(self, tasks: Sequence[int], reports: dict[int, ShardReport]) -> int:
        """Run the tasks that have no report yet, then repeat those with images that another try may read.

        Args:
            tasks: task numbers.
            reports: reports of finished tasks, by number; new reports are added.

        Returns the number of images converted by this call. Raises DataError if too many cannot be stored.
        """
        done = self._run([task for task in tasks if task not in reports], reports)
        again = [task for task, report in reports.items() if report.unsteady]
        if again:
            self.conversion.console.print(
                f"{counted(len(again), 'shard')} again: not all of their images could be read", highlight=False
            )
            done += self._run(again, reports)
        return done

    def _run(self, tasks: list[int], reports: dict[int, ShardReport]) -> int:
        conversion, request, output = self.conversion, self.conversion.request, self.conversion.output
        shard_tasks = (
            ShardTask(
                index=task,
                split=split.name,
                shard=shard,
                rows=rows,
                reader=self.reader,
                output=output,
                options=request.images,
                several_labels=self.plan.several_labels,
                dedup=request.dedup,
            )
            for task, rows in self.plan.rows(tasks)
            for split, shard in [self.plan.place(task)]
        )
        count = sum(self.plan.images_of(task) for task in tasks)
        rejected = sum(report.rejected for report in reports.values())
        engine, most = conversion.machine.shard_runner(request.src, output.where), conversion.machine.max_reject_rate
        with ProgressDisplay(conversion.console, "converting", count) as view:
            for report in engine(shard_tasks, view.update):
                before = reports.get(report.task)
                rejected += report.rejected - (before.rejected if before else 0)
                reports[report.task] = report
                counts = {"rejects": report.rejected, **({"removed": report.removed} if request.dedup else {})}
                output.log("shard", task=report.task, seconds=report.seconds, **counts)
                if rejected > most * self.plan.images:  # the remaining tasks cannot change that
                    refuse_rejects(output, self.plan, reports, most)
        return count
