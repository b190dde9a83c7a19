"""Files or hub -> rows -> formats -> token ids."""

from upweight.data.prepare import Prepared, prepare
from upweight.data.report import Report
from upweight.data.show import shown_rows
from upweight.data.sources import load_rows

__all__ = ["Prepared", "Report", "load_rows", "prepare", "shown_rows"]
