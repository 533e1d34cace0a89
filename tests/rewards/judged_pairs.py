"""(answer column, answer in the response, whether they are equal) as a teacher would judge, by category.

Every category has near misses. The grader `math` judges the pairs of `MISJUDGED` otherwise, and no others.
"""

from __future__ import annotations

MISJUDGED = {
    (r"5\text{ cm}", r"5\text{ m}"),  # units are left out
    (r"\text{No solution}", "no solutions"),
    ("zero", "0"),
}
PAIRS = {
    "fractions": [
        (r"\frac{3}{8}", r"\frac{6}{16}", 1), (r"\frac{3}{8}", r"\frac{8}{3}", 0), (r"\frac{-7}{4}", "-1.75", 1),
        (r"-\frac{7}{4}", r"\frac{7}{4}", 0), ("11/6", r"\dfrac{11}6", 1), ("11/6", "1/6", 0),
        (r"\frac{a}{b}", r"\frac{2a}{2b}", 1), (r"\frac{a}{b}", r"\frac{b}{a}", 0), (r"\frac{5}{6}", "5\u20446", 1),
        (r"\frac{1}{2}", "½", 1), (r"\frac{3}{4}", "½", 0),
    ],
    "decimals": [
        ("0.125", r"\frac18", 1), ("0.125", "0.0125", 0), ("12.50", "12.5", 1), ("12.5", "12.05", 0),
        ("-.75", r"-\frac{3}{4}", 1), ("2.718", "e", 0), ("3.1416", "3.1415", 0), ("1.414", r"\sqrt{2}", 0),
    ],
    "small and large numbers": [
        (r"1.6 \times 10^{-19}", r"9.1 \times 10^{-31}", 0), ("1.6e-19", "9.1e-31", 0), ("1.6e-19", "1.6E-19", 1),
        (r"1.6 \times 10^{-19}", "1.6e-19", 1), (r"6.02 \times 10^{23}", r"6.02 \cdot 10^{23}", 1),
        (r"6.02 \times 10^{23}", r"6.02 \times 10^{22}", 0), (r"3 \times 10^8", "300000000", 1),
        (r"3 \times 10^8", "30000000", 0), ("4.5e3", "4500", 1), (r"2.5\times10^{-3}", "0.0025", 1),
        (r"2.5\times10^{-3}", "0.00025", 0), ("10^{-12}", "0", 0), ("0", "1e-15", 0), ("10^{-12}", "10^{-13}", 0),
        ("6.6 × 10^{-34}", r"6.6\times10^{-34}", 1), ("0.0000001", "0.0000002", 0), ("0.0000001", r"10^{-7}", 1),
        ("2^{-40}", r"\frac{1}{2^{40}}", 1), ("123456789.5", "123456789.4", 0), (r"5\text{ million}", "5", 0),
        (r"5\text{ million}", "5,000,000", 1), ("1.6*10^-19", "1.6e-19", 1), ("2e-1", "2e - 1", 1),
        ("1.60e-19", r"1.6 \times 10^{-19} \text{ C}", 1),
    ],
    "units": [
        (r"12\text{ cm}", "12", 1), ("12", r"12\,\text{cm}", 1), (r"12\text{ cm}^2", r"12\text{ cm}^{2}", 1),
        (r"12\text{ cm}", r"13\text{ cm}", 0), ("36", "36 square units", 1), (r"9.8\,\mathrm{m/s^2}", "9.8", 1),
        ("60", r"60\ \mathrm{km/h}", 1), ("60", r"6\ \mathrm{km/h}", 0), ("15 minutes", r"15\text{ min}", 1),
        (r"5\text{ cm}", r"5\text{ m}", 0),
    ],
    "percent": [
        (r"62.5\%", "62.5", 1), (r"62.5\%", "0.625", 1), (r"62.5\%", r"6.25\%", 0), ("5", r"5\%", 1),
        (r"\frac{1}{4}", r"25\%", 1), (r"\frac{1}{4}", r"0.25\%", 0),
    ],
    "currency": [
        (r"\$18", "18", 1), ("18.50", r"\$18.50", 1), (r"\$1,250", "1250", 1), (r"\$1,250", "1,205", 0),
        ("18", "€18", 1), ("18", r"18 \text{ dollars}", 1), ("18", "£19", 0),
    ],
    "groups of digits": [
        ("1234567", "1,234,567", 1), ("1234567", r"1\,234\,567", 1), ("1234567", r"1,\!234,\!567", 1),
        ("1234567", "1\u2009234\u2009567", 1), ("1234567", "1\u202f234\u202f567", 1), ("1234567", r"1,\!243,\!567", 0),
        ("1234", "1 234", 1), ("1234", "1, 234", 0),
    ],
    "other characters": [
        ("-5", "\u22125", 1), ("-5", "\uff0d\uff15", 1), ("42", "\uff14\uff12", 1), ("42", "\uff12\uff14", 0),
        ("-5", "\u20135", 1), ("2\u00d73", "6", 1), (r"2\sqrt{3}", "2√3", 1), (r"2\sqrt{3}", "3√2", 0),
        ("x^2", "x²", 1), ("x^3", "x²", 0), (r"x \le 4", "x ≤ 4", 1), (r"x \le 4", "x ≥ 4", 0), (r"\infty", "∞", 1),
        (r"-\infty", "∞", 0), (r"\frac{\pi}{6}", "π/6", 1), (r"\frac{\pi}{6}", "π/3", 0), (r"\{1,2\}", "｛1，2｝", 1),
        (r"\sqrt{x+1}", "√(x+1)", 1), (r"\sqrt{x+1}", "√x+1", 0),
    ],
    "intervals": [
        (r"[-2,5)", r"\left[-2,5\right)", 1), ("[-2,5)", "[-2,5]", 0),
        (r"(-\infty,-3)\cup(3,\infty)", "(-∞,-3)∪(3,∞)", 1),
        (r"(-\infty,-3)\cup(3,\infty)", r"(-\infty,-3)\cup[3,\infty)", 0), ("(0,4)", "(0,5)", 0),
        ("[1,2]", "[1.0,2]", 1), (r"(0,1) \cup (1,\infty)", r"(1,\infty) \cup (0,1)", 1),
    ],
    "sets": [
        (r"\{4,9,16\}", r"\{16,4,9\}", 1), (r"\{4,9,16\}", r"\{4,9\}", 0), (r"\{4,9\}", "4, 9", 1),
        (r"\{4,9\}", r"\{4,6\}", 0), (r"\varnothing", r"\emptyset", 1), (r"\emptyset", r"\varnothing", 1),
        (r"\varnothing", r"\{\}", 1), (r"\varnothing", r"\{0\}", 0), (r"\emptyset", "0", 0), (r"\emptyset", "∅", 1),
        (r"\mathbb{Z}", r"\mathbb{R}", 0),
    ],
    "tuples": [
        ("(2,-3)", "( 2, -3 )", 1), ("(2,-3)", "(-3,2)", 0), ("(1,4,9)", r"\left(1,4,9\right)", 1),
        ("(1,4,9)", "(1,4)", 0), (r"(\frac12,3)", "(0.5,3)", 1), ("(2,5)", "x=2, y=5", 1), ("(2,5)", "x=5, y=2", 0),
        (r"\langle 1,2\rangle", "1.2", 0), (r"\langle 1,2\rangle", "(1,2)", 1), (r"(10^{-9},2)", "(0,2)", 0),
    ],
    "matrices": [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", 1),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", 0),
        (r"\begin{pmatrix}\frac12\\0\end{pmatrix}", r"\begin{pmatrix}0.5\\0\end{pmatrix}", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", 0),
        (r"\begin{pmatrix}10^{-9}\\1\end{pmatrix}", r"\begin{pmatrix}0\\1\end{pmatrix}", 0), ("A^T", "A", 0),
        ("A^T", "A^{T}", 1),
    ],
    "radicals": [
        (r"\sqrt{50}", r"5\sqrt{2}", 1), (r"\sqrt{50}", r"2\sqrt{5}", 0), (r"\frac{3}{\sqrt{3}}", r"\sqrt3", 1),
        (r"\sqrt[3]{27}", "3", 1), (r"\sqrt[3]{27}", "9", 0), (r"1+\sqrt{2}", r"\sqrt{2}+1", 1),
        (r"1+\sqrt{2}", r"1-\sqrt{2}", 0),
    ],
    "pi and e": [
        (r"\frac{3\pi}{4}", r"\frac34\pi", 1), (r"\frac{3\pi}{4}", r"\frac{4\pi}{3}", 0), (r"16\pi", "50.27", 0),
        (r"e^{-2}", r"\frac{1}{e^2}", 1), (r"e^{-2}", "e^2", 0), (r"16\pi", "16", 0),
    ],
    "equations": [
        ("y=3x-2", "y = -2+3x", 1), ("y=3x-2", "y=3x+2", 0), ("x^2+y^2=9", "y^2+x^2=9", 1),
        ("x^2+y^2=9", "x^2+y^2=3", 0), (r"x \equiv 3 \pmod 5", "5", 0), (r"x \equiv 3 \pmod 5", r"x\equiv 3\pmod 5", 1),
        ("2x+y=4", "y=4-2x", 1), ("y=3x-2", "3x-2", 1), (r"f(x)=x^2+1", "x^2+1", 1), (r"f(x)=x^2+1", "x^2-1", 0),
    ],
    "derivatives": [
        (r"\frac{dy}{dx}", "0", 0), ("dy/dx", "0", 0), ("0", "dy/dx", 0), (r"\frac{dy}{dx}", r"\frac{dy}{dx}", 1),
        (r"\frac{dy}{dx}", "dy/dx", 1), (r"\frac{dy}{dx}", r"\frac{dx}{dy}", 0), (r"\frac{d}{dx}x^2", "2x", 1),
        (r"\frac{dy}{dx} = 2x", "2x", 1), (r"\frac{dy}{dx} = 2x", "3x", 0), (r"\frac{\partial f}{\partial x}", "0", 0),
        ("y'", "0", 0), ("y'", "y", 0), (r"f'(x)", "f(x)", 0), (r"\frac{dy}{dt}", r"\frac{dy}{dx}", 0),
    ],
    "inequalities": [
        ("x<7", "7>x", 1), ("x<7", r"x \le 7", 0), (r"x \geq -1", r"-1 \leq x", 1), ("x<7", "x>7", 0),
        (r"1<x\le 3", r"1 < x \leq 3", 1), (r"1<x\le 3", r"1 < x < 3", 0), (r"1<x\le 3", "(1,3]", 1),
    ],
    "words": [
        (r"\text{increasing}", "increasing", 1), (r"\text{increasing}", "decreasing", 0),
        ("Monday", r"\text{monday}", 1), (r"\text{No solution}", "no solutions", 1), (r"\text{True}", "False", 0),
        ("Alice", "Bob", 0), ("yes", "Yes.", 1), (r"\text{parabola}", r"\textbf{parabola}", 1), ("zero", "0", 1),
    ],
    "degrees": [
        ("90", "90°", 1), ("90°", "90", 1), (r"45^\circ", "45°", 1), (r"45^\circ", r"54^\circ", 0),
        (r"45^\circ", "45 degrees", 1), (r"37\,^{\circ}\mathrm{C}", "37", 1), ("90", "9°", 0),
    ],
    "repeating decimals": [
        (r"0.\overline{3}", r"\frac{1}{3}", 1), (r"\frac{1}{3}", r"0.\overline{3}", 1), (r"0.1\overline{6}", "1/6", 1),
        (r"0.\overline{142857}", r"\frac17", 1), (r"0.\overline{3}", "0.3", 0),
        (r"0.\overline{3}", r"0.\overline{33}", 1), (r"0.\overline{36}", r"0.3\overline{6}", 0),
        (r"0.\overline{9}", "1", 1), (r"2.\overline{3}", r"\frac{7}{3}", 1), (r"0.\bar{3}", r"\frac{1}{3}", 1),
        (r"-0.\overline{6}", r"-\frac{2}{3}", 1),
    ],
    "mixed numbers": [
        (r"2\frac{3}{4}", "2.75", 1), (r"2\frac{3}{4}", r"\frac{6}{4}", 0), ("2 3/4", r"\frac{11}{4}", 1),
        (r"-1\frac{1}{2}", "-1.5", 1), (r"-1\frac{1}{2}", "-0.5", 0), (r"2\frac{3}{4}", "2 3/4", 1),
    ],
    "plus or minus": [
        (r"\pm 6", "6, -6", 1), (r"\pm 6", "6", 0), (r"3 \pm \sqrt{2}", r"3+\sqrt{2}, 3-\sqrt{2}", 1),
        ("±6", r"\pm 6", 1), (r"3 \pm \sqrt{2}", r"3 + \sqrt{2}", 0), (r"x = \pm 6", "6, -6", 1),
    ],
    "assignments": [
        ("n=12", "12", 1), ("12", "n = 12", 1), ("n=12", "n=21", 0), (r"\theta = 30^\circ", "30", 1),
        (r"x \in \{1,2\}", "1, 2", 1), ("x=1, y=2", "y=2, x=1", 1), ("x=1, y=2", "x=2, y=1", 0),
        ("12", r"\text{Answer: }12", 1),
    ],
    "choices": [
        (r"\text{(C)}", "C", 1), ("C", "(C)", 1), (r"\text{(C)}", r"\textbf{(C)}", 1), ("C", "D", 0), ("(A)", "(B)", 0),
        ("B", r"\text{B}", 1), ("B", r"\mathrm{(B)}", 1), ("B", "(C) 12", 0), ("B", "(BC)", 0),
        ("C", r"\text{(C) } 12", 1),
    ],
    "expressions": [
        ("(x-1)(x+3)", "x^2+2x-3", 1), ("(x-1)(x+3)", "x^2-2x-3", 0), (r"\ln 8", r"3\ln 2", 1),
        (r"\ln 8", r"2\ln 3", 0), (r"\sin 2x", r"2\sin x\cos x", 1), (r"\sin 2x", r"2\sin x", 0),
        (r"\binom{6}{2}", "15", 1), ("5!", "120", 1), ("5!", "5", 0), ("4+3i", "3i+4", 1), ("4+3i", "4-3i", 0),
        ("|x-2|", "|2-x|", 1), ("|x-2|", "x-2", 0), (r"\log_2 8", "3", 1), (r"a_n", "a_m", 0), (r"2^{n}", "n^2", 0),
        ("x_1", "x_2", 0),
    ],
}  # fmt: skip
