"""VTAB-1k's data: 19 tasks of 1,000 training images each, from files that lie under one folder.

`tasks` has the rows, `splits` the words of TFDS, `labels` the label rules, `find` the places and `records` the TFRecord
files; `task_data` puts them together, `ids` states which images were taken, `stand_ins` and `photo_scenes` make data.
"""

from vitral.data.vtab.find import available
from vitral.data.vtab.ids import write_ids
from vitral.data.vtab.photo_scenes import write_real_counts, write_real_locations
from vitral.data.vtab.stand_ins import write_stand_in
from vitral.data.vtab.task_data import VtabTask, open_task
from vitral.data.vtab.tasks import TASKS, Task, find_task

__all__ = [
    "TASKS",
    "Task",
    "VtabTask",
    "available",
    "find_task",
    "open_task",
    "write_ids",
    "write_real_counts",
    "write_real_locations",
    "write_stand_in",
]
