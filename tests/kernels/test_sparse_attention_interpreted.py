"""Runs the interpreter's cases of sparse attention, selection and page summaries in a process of their own."""


def test_kernels_in_the_interpreter(in_interpreter) -> None:
    in_interpreter(
        __file__, "interpreted_sparse_attention.py", "interpreted_selection.py", "interpreted_page_summary.py"
    )
