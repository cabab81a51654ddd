"""Code that hides packages, named in ``sys.argv[1]`` and separated by commas, as if they were not installed."""

WITHOUT = """
import importlib.util, sys
missing, find_spec = sys.argv[1].split(","), importlib.util.find_spec
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"not installed: {name}", name=name)
sys.meta_path.insert(0, Missing())
importlib.util.find_spec = lambda name, package=None: None if name in missing else find_spec(name, package)
"""
