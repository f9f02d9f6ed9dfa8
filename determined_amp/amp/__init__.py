"""The heart: precision, scaler, schedules, metrics, guard and checkpoints of one trial."""
