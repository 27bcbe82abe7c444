"""The stage of the attack suite: the machine, the runs on it, and what is judged from outside."""
