"""A model's own wishes for sampling are heard as far as they make sense."""

from tqchat.engine.loading import suggested


def test_sensible_numbers_are_taken() -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0, "eos_token_id": 2}
    assert suggested(config) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


def test_everything_else_is_left_out() -> None:
    config = {
        "temperature": "hot",
        "top_p": -1,
        "top_k": float("nan"),
        "min_p": True,
        "repetition_penalty": 1e300,
    }
    assert suggested(config) == {}
