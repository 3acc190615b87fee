"""The tuning database: what tuning learnt on one pool, device and mode, kept once for everybody.

A *snapshot* is a set of tuning records with the log of the sessions that measured them (`records`). The files in
which MIGraphX and MIOpen keep theirs are read and written by `formats`; `exchange` is how a snapshot travels and
is stored. In `database`, `TuningDatabase` restores a snapshot into a job's private folder, takes the delta that the job
commits, and merges deltas into the head; `Collector` commits what a running child learns.

Merging is a join: associative, commutative and idempotent. So a delta may be committed, merged and merged again
in any order, and nothing is lost or counted twice. `docs/tuning.md` describes layout and rules.
"""
