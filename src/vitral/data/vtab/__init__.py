"""VTAB-1k's data: 19 tasks of 1,000 training images each, from files that lie under one folder.

`tasks` has the rows, `splits` the words of TFDS, `labels` the label rules, `find` the places and `records` the TFRecord
files; `task_data` puts them together and `ids` states which images were taken.
"""

from vitral.data.vtab.ids import write_ids
from vitral.data.vtab.task_data import VtabTask, open_task
from vitral.data.vtab.tasks import TASKS, Task, find_task

__all__ = ["TASKS", "Task", "VtabTask", "find_task", "open_task", "write_ids"]
