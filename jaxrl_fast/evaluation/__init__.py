"""What a finished run can do: act, play episodes, make a video."""
