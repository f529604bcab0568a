"""The suite is tested."""
