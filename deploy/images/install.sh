#!/bin/sh
# Installs the farm for one kind of machine, from the wheel and its lock in /dist, with the list of what it is made of.
set -eu
python3 -m venv /opt/farm
/opt/farm/bin/pip install --no-cache-dir --require-hashes --find-links /dist --requirement /dist/migraphx_farm-*."$1".txt
/opt/farm/bin/pip uninstall --yes pip
/opt/farm/bin/python /dist/sbom.py > /opt/farm/sbom.json
