"""`cocktail plan` of a run whose peers pass packets on."""

import json

from in_this_process import Run


def test_a_plan_counts_the_packets_that_peers_with_an_open_port_take_off_a_thin_hub(cocktail: Run) -> None:
    lines = ("plan", "smoke", "--gpu", "t4", "--peers", "4", "--step-time", "10ms", "--lines", "20/100")
    thin = json.loads(cocktail(*lines, "--lines", "hub=0.2/100", "--json").out)["line"]
    passed = json.loads(cocktail(*lines, "--lines", "hub=0.2/100", "--lines", "listen=4", "--json").out)

    assert (thin["over_hub"], passed["line"]["over_hub"]) == (4, 1)
    assert passed["line"]["computing"] > thin["computing"]
    assert "8 local steps" in thin["rung"]
    assert "4 local steps" in passed["line"]["rung"], "a run needs fewer where the line carries more"
