"""The compile farm: models in, tuned and verified programs for AMD GPUs out.

The upper folders say who runs the code; below them is what is asked and what is kept. A folder imports only folders
below it (`tests/unit/test_imports.py` has the table).

    cli/        commands, as people and scripts type them
    client/     what a submitter runs: read and freeze a manifest, talk to the API, fetch and check artifacts
    local/      the whole farm on this machine, and one model without a farm
    api/        HTTP: routes, schemas, who may do what                                     (server)
    pages/      what people look at in a browser: documents in, HTML out                   (server)
    control/    loops: dispatch, leases, resuming, retention                               (server)
    builds/     a build: plan, accept, read, judge, finish                                 (server)
    node/       a worker node: supervisor, Celery process, slots, GPUs, the executor of one attempt
    compiling/  one attempt in sealed child processes; what `farm reproduce` copies
    runner/     the child itself: one module per compiler; imports nothing of the farm

    manifest/   what a user asks for: YAML, checked field by field
    models/     reading models and their data
    targets/    compilers, devices and pools
    matrix/     a manifest expanded to cells with their specs
    jobs/       states and failure kinds, and how long a compile takes
    results/    accuracy and speed, and what they mean for a build

    metrics/    what processes count and time, for Prometheus
    store/      Redis: builds, jobs and workers as they are now
    artifacts/  object storage: programs, sidecars, refs, tokens
    tuning/     what tuning learnt, and the tuner that learns it
    packs/      programs in the files that ONNX Runtime and Triton load

    app.py builds the rooms of a process; broker.py is Celery; spec.py has the cache key; errors.py the exit codes;
    inert.py makes foreign text harmless to print.
"""

__version__ = "0.2.0.dev0"
