"""What needs other packages is collected in their environment alone (`make test-integrations`), there always."""

from importlib.util import find_spec

if find_spec("trl") is None:
    collect_ignore_glob = ["test_trl*.py", "test_verl*.py", "test_skyrl*.py", "test_environments.py"]
