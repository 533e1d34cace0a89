"""Records a run: metric names, trackers, console progress, logs and the report."""
