"""Studies: methods side by side on real data, each with settings chosen for it, over several seeds."""
