"""The code that a release is known by."""

from omniload.actors.ray.release import code_in


def test_only_modules_tell_releases_apart(tmp_path):
    (tmp_path / "front").mkdir()
    module = tmp_path / "front" / "loader.py"
    module.write_text("one")
    code = code_in(tmp_path)

    # What Emacs puts beside a file that is being edited, macOS on foreign disks, Jupyter, and Python itself.
    (tmp_path / "front" / ".#loader.py").symlink_to("someone@host.7")
    (tmp_path / "front" / "._loader.py").write_bytes(b"\0")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "loader-checkpoint.py").write_text("old")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "loader.cpython-312.pyc").write_bytes(b"")
    assert code_in(tmp_path) == code

    module.write_text("two")
    assert code_in(tmp_path) != code
    module.write_text("one")
    module.rename(tmp_path / "loader.py")
    assert code_in(tmp_path) != code
