#!/usr/bin/env bash
# Adds runs to the history that lies on a branch of its own, and pushes it; see ci/history_push.sh --help.
set -euo pipefail

usage() {
  cat <<'END'
usage: ci/history_push.sh DIR [BRANCH]

Commits every file under DIR (made by `kvbench history add RUN --to DIR`) to BRANCH (default: kvbench-history) of the
remote, below history/, and pushes. The branch is made as an orphan when it is not there. Files are only added, so two
jobs that push at once both keep their runs: whoever is second begins again from the branch as it is then. A file that
is there with other contents is refused. Your checkout, index and branches stay as they are.

Environment:
  HISTORY_REMOTE         remote or URL (default: origin)
  KVBENCH_HISTORY_TOKEN  a token that may push, for an https remote; handed to git by its credential helper
  HISTORY_TRIES          how often to begin again (default: 10)

Exit codes: 0 pushed, or all was there; 1 a file is there with other contents; 2 usage; 4 the remote refused.
END
}

case "${1:-}" in
  -h | --help) usage; exit 0 ;;
esac
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  usage >&2
  exit 2
fi
dir=$1 branch=${2:-kvbench-history} remote=${HISTORY_REMOTE:-origin} tries=${HISTORY_TRIES:-10}
if [ ! -d "$dir" ] || [ -z "$(find "$dir" -type f -print -quit)" ]; then
  echo "history_push: $dir holds no files; make it with: kvbench history add RUN --to $dir" >&2
  exit 2
fi
ref="refs/heads/$branch"
git check-ref-format "$ref" || { echo "history_push: $branch is no name for a branch" >&2; exit 2; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/tree"
export GIT_INDEX_FILE="$scratch/index" GIT_TERMINAL_PROMPT=0
export GIT_AUTHOR_NAME="${GIT_AUTHOR_NAME:-kvbench}" GIT_AUTHOR_EMAIL="${GIT_AUTHOR_EMAIL:-kvbench@localhost}"
export GIT_COMMITTER_NAME="$GIT_AUTHOR_NAME" GIT_COMMITTER_EMAIL="$GIT_AUTHOR_EMAIL"
if [ -n "${KVBENCH_HISTORY_TOKEN:-}" ]; then  # through the environment: a command line is for all to read
  export KVBENCH_HISTORY_TOKEN GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=credential.helper GIT_CONFIG_VALUE_0=
  export GIT_CONFIG_KEY_1=credential.helper
  # shellcheck disable=SC2016  # git's own shell expands it
  export GIT_CONFIG_VALUE_1='!f() { echo username=kvbench; echo "password=$KVBENCH_HISTORY_TOKEN"; }; f'
fi

# Prints the branch's commit on the remote, or nothing when there is no such branch.
tip_of_branch() {
  local found
  found=$(git ls-remote --heads "$remote" "$ref") || return 4
  [ -z "$found" ] || git fetch --quiet --no-tags --depth 1 "$remote" "$ref" || return 4
  [ -z "$found" ] || git rev-parse FETCH_HEAD
}

# Prints the tree with DIR's files on top of the commit $1, which may be empty.
tree_with_files() {
  local tip=$1 changed
  rm -f "$GIT_INDEX_FILE"
  if [ -n "$tip" ]; then git read-tree "$tip"; else git read-tree --empty; fi
  git --work-tree="$scratch/tree" add --force --ignore-removal -- .
  if [ -n "$tip" ]; then
    changed=$(git diff-index --cached --name-only --diff-filter=a "$tip")
    if [ -n "$changed" ]; then
      echo "history_push: $branch has these files with other contents, and a history only grows:" >&2
      printf '%s\n' "$changed" >&2
      return 1
    fi
  fi
  git write-tree
}

mkdir "$scratch/tree/history"
cp -R "$dir/." "$scratch/tree/history/"
for ((try = 1; try <= tries; try++)); do
  tip=$(tip_of_branch) || { echo "history_push: cannot read $branch of $remote" >&2; exit 4; }
  tree=$(tree_with_files "$tip") || exit 1
  if [ -n "$tip" ] && [ "$tree" = "$(git rev-parse "$tip^{tree}")" ]; then
    echo "history_push: all of $dir is on $branch already"
    exit 0
  fi
  commit=$(git commit-tree "$tree" ${tip:+-p "$tip"} -m "Runs of ${KVBENCH_HISTORY_NOTE:-kvbench}")
  if git push --quiet "$remote" "$commit:$ref"; then
    echo "history_push: $dir is on $branch as $commit"
    exit 0
  fi
  echo "history_push: try $try of $tries was refused; beginning again from the branch as it is now" >&2
  [ "$try" -eq "$tries" ] || sleep "$((RANDOM % 3)).$((RANDOM % 10))"
done
echo "history_push: $remote refused $tries times: may this job push to $branch?" >&2
exit 4
