"""Figures as people read them."""


def bytes_text(count: float) -> str:
    """1536 -> "1.5 KiB". Three digits at most, so that columns stay put."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count /= 1024
        power += 1
    digits = 0 if power == 0 or count >= 99.95 else 1
    return f"{count:.{digits}f} {units[power]}"


def file_size_text(count: float) -> str:
    """The same as file managers write it: 524288 -> "512 KB"."""
    return bytes_text(count).replace("iB", "B")


def seconds_text(seconds: float) -> str:
    """0.84 -> "0.8 s", 95 -> "1 min 35 s", 4000 -> "1 h 7 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
