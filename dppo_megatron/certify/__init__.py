"""How far engine and trainer are apart, and which operator is the first to differ."""
