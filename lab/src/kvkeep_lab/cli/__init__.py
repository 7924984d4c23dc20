"""The lab's commands of ``kvkeep``. Each has a `PLUGIN`, which the entry points of the package name."""
