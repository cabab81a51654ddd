#!/usr/bin/env bash
# Checks what a release consists of, and writes its notes and its bills of materials (CycloneDX).
#   ci/release.sh DIST TAG OUT     DIST: wheel and source archive; TAG: v1.2.3; OUT gets notes.md and sbom*.cdx.json
# Exit code 1: the wheel has another version, or CHANGELOG.md has no section for this one.
set -euo pipefail
dist=$1 version=${2#v} out=$3
mkdir -p "$out"

for file in "kvbench-$version-py3-none-any.whl" "kvbench-$version.tar.gz"; do
  if [ ! -e "$dist/$file" ]; then
    echo "no $file in $dist, but: $(ls "$dist"): tag the commit v$version before it is built" >&2
    exit 1
  fi
done

awk -v version="$version" '$1 == "##" {on = ($0 == "## " version); next} on' CHANGELOG.md > "$out/notes.md"
if ! grep -q '[^[:space:]]' "$out/notes.md"; then
  echo "CHANGELOG.md has no section '## $version': write what changes for users" >&2
  exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/tool"
"$work/tool/bin/pip" install --quiet --disable-pip-version-check cyclonedx-bom
sed "s/^dynamic = .*/version = \"$version\"/" pyproject.toml > "$work/pyproject.toml"  # the bill's own name and version
bill() {  # NAME EXTRA: what pip installs with it today
  python3 -m venv --without-pip "$work/$1"
  "$work/tool/bin/pip" --python "$work/$1/bin/python" install --quiet --disable-pip-version-check \
    "$dist/kvbench-$version-py3-none-any.whl$2"
  "$work/tool/bin/cyclonedx-py" environment "$work/$1/bin/python" --pyproject "$work/pyproject.toml" --output-reproducible \
    --of JSON --output-file "$out/$1.cdx.json"
}
bill sbom ""
bill sbom-engine "[engine]"
