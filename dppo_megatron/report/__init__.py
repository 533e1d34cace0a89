"""Records a run with metrics, trackers, console progress, logs and the report."""
