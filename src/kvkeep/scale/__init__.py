"""Past one process: the lines of a job on a cluster of Ray (`worker`, `crew`, `cluster`), datasets of Ray (`ray`)."""
