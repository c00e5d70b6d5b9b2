"""`jaxpaged chat` from a pipe, with an engine that echoes the whole conversation."""

from tests.entrypoints.cli.conftest import EchoInputs


def test_every_line_is_a_turn_and_the_conversation_grows(run, piped):
    piped("Hi\nAgain\n")
    finished = run("chat")
    assert finished.status == 0
    first = "user:Hi"
    assert finished.out == f"{first}\nuser:Hi|assistant:{first}|user:Again\n"
    assert finished.err == ""


def test_the_system_message_comes_first_and_stays_after_clear(run, piped):
    piped("Hi\n/clear\nHo\n")
    finished = run("chat", "--system", "Be brief")
    assert finished.out == "system:Be brief|user:Hi\nsystem:Be brief|user:Ho\n"


def test_system_can_be_changed_and_starts_over(run, piped):
    piped("Hi\n/system Shout\nHo\n/system\nHm\n")
    assert run("chat").out == "user:Hi\nsystem:Shout|user:Ho\nuser:Hm\n"


def test_exit_ends_the_conversation(run, piped):
    piped("/exit\nHi\n")
    finished = run("chat")
    assert (finished.status, finished.out) == (0, "")


def test_help_lists_the_commands(run, piped):
    piped("/help\n")
    finished = run("chat")
    assert all(name in finished.err for name in ("/help", "/clear", "/system", "/exit"))


def test_an_unknown_command_names_the_nearest_and_counts_as_a_failure(run, piped):
    piped("/claer\nHi\n")
    finished = run("chat")
    assert finished.status == 1
    assert finished.err == "jaxpaged chat: unknown command '/claer'. Did you mean '/clear'?\n"
    assert finished.out == "user:Hi\n"


def test_a_failed_turn_is_forgotten_and_the_next_one_works(run, piped):
    piped("refuse\nfail\nHi\n")
    finished = run("chat")
    assert finished.status == 1
    assert "is refused" in finished.err
    assert "its logits are not numbers" in finished.err
    assert finished.out.splitlines()[-1] == "user:Hi"


def test_answers_may_fill_the_context(run, piped):
    piped("Hi\n")
    assert run("chat").engine.params[0].max_tokens is None


def test_a_model_without_template_cannot_chat(run, piped):
    piped("Hi\n")
    finished = run("chat", inputs=EchoInputs(template=False))
    assert finished.status == 2
    assert "no chat template" in finished.err
    assert finished.engine.is_shut_down


def test_several_answers_are_wrong_usage(run):
    finished = run("chat", "-n", "2")
    assert finished.status == 2
    assert "Leave it out" in finished.err


def test_an_interrupt_from_a_pipe_exits_with_130(run, piped):
    piped("interrupt\n")
    finished = run("chat")
    assert finished.status == 130
    assert finished.engine.aborted == ["turn-0"]
