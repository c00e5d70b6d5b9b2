"""`jaxpaged compile`: what is refused before anything is compiled. What it writes is tested in tests/worker."""

import pytest

from jaxpaged.entrypoints.cli import main


@pytest.fixture
def compiled(monkeypatch):
    """What would be compiled: (options, folder)."""
    calls = []
    monkeypatch.setattr("jaxpaged.engine.build.UniProcExecutor", lambda *args: calls.append(args) or Executor())
    return calls


class Executor:
    @property
    def worker(self):
        return self

    def save_bundle(self, folder):
        (folder / "saved").touch()

    def shutdown(self):
        pass


def test_the_model_and_engine_flags_become_options_and_the_cache_is_left_alone(compiled, tmp_path):
    assert main(["compile", "demo", "-o", str(tmp_path / "out"), "--max-num-seqs", "4"]) == 0
    config = compiled[0][0]
    assert (config.model.model, config.scheduler.max_num_seqs) == ("demo", 4)
    assert config.compile.compilation_cache_dir == "off"
    assert (tmp_path / "out" / "saved").exists()


def test_a_folder_that_holds_something_is_left_alone(compiled, tmp_path, capsys):
    (tmp_path / "precious").write_text("mine")
    assert main(["compile", "demo", "-o", str(tmp_path)]) == 2
    assert "is not empty. Choose a new folder." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"] and not compiled


def test_a_folder_that_cannot_be_written_is_found_before_compiling(compiled, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["compile", "demo", "-o", str(tmp_path / "file" / "out")]) == 2
    assert "cannot write to" in capsys.readouterr().err and not compiled


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["a", "--model", "b"], "two models are given, a and --model b"), (["--bundle", "b"], "has its programs already")],
)
def test_contradictions_are_wrong_usage(compiled, tmp_path, capsys, flags, said):
    assert main(["compile", *flags, "-o", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_an_output_folder_it_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as end:
        main(["compile", "demo"])
    assert end.value.code == 2
    assert "-o/--output" in capsys.readouterr().err
