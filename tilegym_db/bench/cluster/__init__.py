"""Devices of a Ray cluster at work: on each node an actor for every device, which does what a supervisor's parent does here."""
