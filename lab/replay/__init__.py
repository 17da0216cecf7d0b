"""The gates of `kdissect replay`: experiments with real brokers. See lab/README.md."""
