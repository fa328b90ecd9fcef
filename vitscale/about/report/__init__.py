"""The report: one page and results.json, from which every claim about runs or a study can be checked."""

from vitscale.about.report.content import PAGE_FILE, check_folder, gather, write_report
from vitscale.about.report.sections import page
