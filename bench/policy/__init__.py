"""Every promise about policies, prefetch and the simulator, measured by one command.

`python -m bench policy` runs it. Hits are facts of a simulation; costs are measured, here and now.
"""
