"""The report: one page and results.json, from which every claim about runs or a study can be checked."""

from vitscale.about.report.content import gather
from vitscale.about.report.sections import page
from vitscale.about.report.writing import PAGE_FILE, RESULTS_FILE, write_report

__all__ = ["PAGE_FILE", "RESULTS_FILE", "gather", "page", "write_report"]
