"""Other schedulers, as planners of this product: what its own policy is measured against.

Each module says which rules it follows and where they are from. All are functions of a `Snapshot`,
as `tokenflow.scheduler.plan` is, so coordinator, engine and cache under them are the same ones;
none is offered for serving. Where a scheduler remembers something (a ratio, the time of its last
pass), its planner is a small object that holds just that, seed-free, for one run.

Common to all, because the product demands it of any planner: nobody is paused before its first
token, while it is in prefill again, or if its kind cannot be resumed; what the client holds is not
started; slots and blocks are never exceeded. A pause keeps the KV in the engine's cache until the
room is needed, so a baseline computes again only what was really lost: its own field gives it less.
"""
