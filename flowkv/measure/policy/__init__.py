"""Every promise about policies, prefetch and the simulator, measured by one command.

`flowkv bench policy` runs it. Hits are facts of a simulation; costs are measured on this machine.
"""
