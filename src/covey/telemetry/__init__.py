"""Records and reports of a run: JSONL files, the console, external trackers, charts and the final report."""

from covey.telemetry.base import EpisodeView, RunInfo
from covey.telemetry.console import report_activity
from covey.telemetry.evaluations import evaluation_files, read_evaluation
from covey.telemetry.history import History, Record, read_history
from covey.telemetry.jsonl import TokenRow, episode_record, read_episodes
from covey.telemetry.report import compare_curves, curve_figure, html_summary, print_summary, write_report
from covey.telemetry.telemetry import Telemetry, check_logging

__all__ = ["EpisodeView", "History", "Record", "RunInfo", "Telemetry", "TokenRow", "check_logging", "compare_curves"]
__all__ += ["curve_figure", "episode_record", "evaluation_files", "html_summary", "print_summary", "read_episodes"]
__all__ += ["read_evaluation", "read_history", "report_activity", "write_report"]
