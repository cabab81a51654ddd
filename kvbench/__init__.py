"""kvbench: what did a paged KV-cache engine buy, what did it cost, and may it ship?"""

__version__ = "0.1.0"
