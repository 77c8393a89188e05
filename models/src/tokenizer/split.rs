//! Cuts of text into words.
//!
//! Nearly all published patterns end in `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word that
//! follows. Here the run is matched by a pattern of its own and the last character is given back afterwards, so that matching
//! needs no lookahead and no backtracking.

use crate::text_error::TextError;
use crate::text_rules::{Behavior, Cut, Pattern};
use regex_automata::Input;
use regex_automata::meta::{BuildError, Config, Regex};
use regex_automata::util::syntax;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Longest pattern, in bytes; the longest published one has a thousand.
const MAX_PATTERN_BYTES: usize = 16 << 10;
/// Memory of a compiled pattern.
const MAX_COMPILED_BYTES: usize = 16 << 20;
/// Cuts of one tokenizer; published ones have up to six.
const MAX_CUTS: usize = 32;
/// Longest time for one section of text. Patterns that look far ahead at every place would take for ever; published ones
/// need some 50 ns a byte.
const MAX_TIME: Duration = Duration::from_secs(20);
/// Matches between two looks at the clock.
const MATCHES_A_LOOK: usize = 256;

/// All cuts of a tokenizer, ready to work.
#[derive(Debug)]
pub(super) struct Splitter {
    cutters: Vec<Cutter>,
}

#[derive(Debug)]
struct Cutter {
    finder: Finder,
    behavior: Behavior,
    invert: bool,
}

#[derive(Debug)]
enum Finder {
    Text(String),
    Digits { individual: bool },
    Words(WordPattern),
}

/// A pattern whose alternative for white space is taken out.
#[derive(Debug)]
struct WordPattern {
    regex: Regex,
    /// The number of the pattern that matches runs of white space.
    space: Option<usize>,
    /// Whether a single character of white space before a word is a match.
    takes_single_space: bool,
}

impl Splitter {
    pub(super) fn new(cuts: &[Cut]) -> Result<Self, TextError> {
        if cuts.len() > MAX_CUTS {
            return Err(TextError::UnsupportedFeature { feature: format!("{} cuts one after the other", cuts.len()) });
        }
        let cutter = |cut: &Cut| {
            Ok(match cut {
                Cut::Digits { individual } => Cutter {
                    finder: Finder::Digits { individual: *individual },
                    behavior: if *individual { Behavior::Isolated } else { Behavior::Contiguous },
                    invert: false,
                },
                Cut::Pattern { pattern, behavior, invert } => Cutter {
                    finder: match pattern {
                        Pattern::Text(text) => Finder::Text(text.clone()),
                        Pattern::Regex(regex) => Finder::Words(WordPattern::new(regex)?),
                    },
                    behavior: *behavior,
                    invert: *invert,
                },
            })
        };
        Ok(Self { cutters: cuts.iter().map(cutter).collect::<Result<_, TextError>>()? })
    }

    /// Hands every word of `text`, in order, to `word`. The words' concatenation is `text`.
    pub(super) fn split(
        &self,
        text: &str,
        mut word: impl FnMut(&str) -> Result<(), TextError>,
    ) -> Result<(), TextError> {
        split_by(&self.cutters, text, Instant::now() + MAX_TIME, &mut word)
    }
}

fn split_by(
    cutters: &[Cutter],
    text: &str,
    deadline: Instant,
    word: &mut dyn FnMut(&str) -> Result<(), TextError>,
) -> Result<(), TextError> {
    let Some((cutter, rest)) = cutters.split_first() else {
        return if text.is_empty() { Ok(()) } else { word(text) };
    };
    if cutter.behavior == Behavior::Isolated {
        // Without a list of pieces: this is the usual one.
        let mut start = 0;
        cutter.finder.find(text, deadline, &mut |found| {
            if found.start > start {
                split_by(rest, &text[start..found.start], deadline, word)?;
            }
            start = found.end;
            split_by(rest, &text[found], deadline, word)
        })?;
        return if start < text.len() { split_by(rest, &text[start..], deadline, word) } else { Ok(()) };
    }
    for piece in cutter.pieces(text, deadline)? {
        split_by(rest, &text[piece], deadline, word)?;
    }
    Ok(())
}

impl Cutter {
    fn pieces(&self, text: &str, deadline: Instant) -> Result<Vec<Range<usize>>, TextError> {
        let mut parts: Vec<(Range<usize>, bool)> = Vec::new();
        let mut start = 0;
        self.finder.find(text, deadline, &mut |found| {
            if found.start > start {
                parts.push((start..found.start, self.invert));
            }
            start = found.end;
            parts.push((found, !self.invert));
            Ok(())
        })?;
        if start < text.len() {
            parts.push((start..text.len(), self.invert));
        }
        Ok(joined(parts, self.behavior))
    }
}

/// Puts parts together as `behavior` says; `true` marks matches.
fn joined(mut parts: Vec<(Range<usize>, bool)>, behavior: Behavior) -> Vec<Range<usize>> {
    let backwards = behavior == Behavior::WithNext;
    if backwards {
        parts.reverse();
    }
    let mut pieces: Vec<Range<usize>> = Vec::with_capacity(parts.len());
    // Two matches next to each other stay apart, as do the first of them and nothing before it.
    let mut before_is_match = behavior == Behavior::Contiguous && parts.first().is_some_and(|part| part.1);
    for (part, is_match) in parts {
        let joins = match behavior {
            Behavior::Isolated => false,
            Behavior::Contiguous => is_match == before_is_match,
            Behavior::WithPrevious | Behavior::WithNext => is_match && !before_is_match,
        };
        match pieces.last_mut() {
            Some(last) if joins && backwards => last.start = part.start,
            Some(last) if joins => last.end = part.end,
            _ => pieces.push(part),
        }
        before_is_match = is_match;
    }
    if backwards {
        pieces.reverse();
    }
    pieces
}

impl Finder {
    /// Hands every match, in order and never empty, to `found`.
    fn find(
        &self,
        text: &str,
        deadline: Instant,
        found: &mut dyn FnMut(Range<usize>) -> Result<(), TextError>,
    ) -> Result<(), TextError> {
        match self {
            Self::Text(wanted) => {
                text.match_indices(wanted.as_str()).try_for_each(|(at, part)| found(at..at + part.len()))
            }
            Self::Digits { individual } => {
                let mut run: Option<Range<usize>> = None;
                for (at, digit) in text.char_indices().filter(|(_, c)| c.is_numeric()) {
                    let digit = at..at + digit.len_utf8();
                    match &mut run {
                        Some(run) if !individual && run.end == at => run.end = digit.end,
                        _ => {
                            if let Some(done) = run.replace(digit) {
                                found(done)?;
                            }
                        }
                    }
                }
                run.map_or(Ok(()), found)
            }
            Self::Words(pattern) => pattern.find(text, deadline, found),
        }
    }
}

impl WordPattern {
    fn new(pattern: &str) -> Result<Self, TextError> {
        let refused = |reason: String| TextError::Pattern { pattern: shortened(pattern), reason };
        if pattern.len() > MAX_PATTERN_BYTES {
            return Err(refused(format!("it is longer than {MAX_PATTERN_BYTES} bytes")));
        }
        if has_possessive(pattern) {
            return Err(refused("possessive quantifiers are not supported".to_owned()));
        }
        let tails = [(r"|\s+(?!\S)|\s+", true), (r"|\s+(?!\S)", false)];
        let split = tails.iter().find_map(|(tail, single)| Some((pattern.strip_suffix(tail)?, *single)));
        let (patterns, space, takes_single_space) = match split {
            Some((words, single)) => (vec![words, r"\s+"], Some(1), single),
            None => (vec![pattern], None, false),
        };
        let regex = Regex::builder()
            .configure(Config::new().nfa_size_limit(Some(MAX_COMPILED_BYTES)))
            .syntax(syntax::Config::new().multi_line(true))
            .build_many(&patterns)
            .map_err(|error| refused(reason(&error)))?;
        Ok(Self { regex, space, takes_single_space })
    }

    fn find(
        &self,
        text: &str,
        deadline: Instant,
        found: &mut dyn FnMut(Range<usize>) -> Result<(), TextError>,
    ) -> Result<(), TextError> {
        let (mut at, mut matches) = (0, 0);
        while at < text.len() {
            let Some(matched) = self.regex.find(Input::new(text).range(at..)) else { break };
            matches += 1;
            if matches % MATCHES_A_LOOK == 0 && Instant::now() > deadline {
                return Err(TextError::SlowPattern { limit: MAX_TIME });
            }
            let mut range = matched.range();
            let is_space = self.space == Some(matched.pattern().as_usize());
            if is_space && range.end < text.len() {
                let last = text[range.clone()].chars().next_back().map_or(0, char::len_utf8);
                if range.len() > last {
                    range.end -= last;
                } else if !self.takes_single_space {
                    at = range.end;
                    continue;
                }
            }
            if range.is_empty() {
                at = range.end + text[range.end..].chars().next().map_or(1, char::len_utf8);
                continue;
            }
            at = range.end;
            found(range)?;
        }
        Ok(())
    }
}

fn reason(error: &BuildError) -> String {
    match error.syntax_error() {
        // The whole text shows the pattern again, over several lines.
        Some(syntax) => syntax.to_string().lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned(),
        None if error.size_limit().is_some() => format!("it needs more than {MAX_COMPILED_BYTES} bytes of memory"),
        None => error.to_string(),
    }
}

fn shortened(pattern: &str) -> String {
    pattern.chars().take(200).collect()
}

/// Whether a quantifier is followed by a plus sign, which backtracking engines read as "gives nothing back".
fn has_possessive(pattern: &str) -> bool {
    let mut chars = pattern.chars().peekable();
    let (mut depth, mut after_quantifier, mut after_atom) = (0u32, false, false);
    while let Some(char) = chars.next() {
        let quantifies = depth == 0 && after_atom && matches!(char, '?' | '*' | '+' | '}');
        match char {
            '\\' => {
                chars.next();
                // The braces of a class or code point are no quantifier.
                if chars.peek() == Some(&'{') {
                    chars.by_ref().find(|c| *c == '}');
                }
            }
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            '+' if depth == 0 && after_quantifier => return true,
            _ => {}
        }
        after_quantifier = quantifies && !after_quantifier;
        after_atom = !matches!(char, '(' | '|');
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::names;
    use proptest::prelude::*;

    fn words_of(cuts: &[Cut], text: &str) -> Vec<String> {
        let mut words = Vec::new();
        Splitter::new(cuts)
            .unwrap()
            .split(text, |w| {
                words.push(w.to_owned());
                Ok(())
            })
            .unwrap();
        words
    }

    fn words(name: &str, text: &str) -> Vec<String> {
        words_of(&names::named_rules(name).unwrap().cuts, text)
    }

    #[test]
    fn white_space_leaves_its_last_character_to_the_next_word() {
        assert_eq!(words("gpt-2", "  two  \n x"), ["  two"[..1].to_owned(), " two".into(), "  \n".into(), " x".into()]);
        assert_eq!(words("gpt-2", "a  "), ["a", "  "]);
        assert_eq!(words("qwen2", "a \n  b\n"), ["a", " \n", " ", " b", "\n"]);
        assert_eq!(words("qwen2", "\t\tx y"), ["\t", "\tx", " y"]);
    }

    #[test]
    fn digits_are_cut_as_each_name_says() {
        assert_eq!(words("gpt-2", "a 1234"), ["a", " 1234"]);
        assert_eq!(words("smollm", "a  12"), ["a", "  ", "1", "2"]);
        assert_eq!(words("qwen2", "a 1234"), ["a", " ", "1", "2", "3", "4"]);
        assert_eq!(words("llama-bpe", "a 1234"), ["a", " ", "123", "4"]);
        assert_eq!(words("deepseek-v3", "a 1234"), ["a", " ", "123", "4"]);
        assert_eq!(words_of(&[Cut::Digits { individual: false }], "ab12c³4"), ["ab", "12", "c", "³4"]);
        assert_eq!(words_of(&[Cut::Digits { individual: true }], "12c"), ["1", "2", "c"]);
    }

    #[test]
    fn contractions() {
        assert_eq!(words("gpt-2", "we'll I'M"), ["we", "'ll", " I", "'", "M"]);
        assert_eq!(words("qwen2", "we'll I'M"), ["we", "'ll", " I", "'M"]);
        assert_eq!(words("gpt-4o", "we'll I'M"), ["we'll", " I'M"]);
        assert_eq!(words("tekken", "helloWorld HTMLtag"), ["hello", "World", " HTMLtag"]);
    }

    /// Wanted pieces are those of the `tokenizers` library's documentation of its `Split`.
    #[test]
    fn behaviors() {
        let cut = |behavior, invert| {
            let pattern = Pattern::Text("-".into());
            words_of(&[Cut::Pattern { pattern, behavior, invert }], "the-final--countdown")
        };
        assert_eq!(cut(Behavior::Isolated, false), ["the", "-", "final", "-", "-", "countdown"]);
        assert_eq!(cut(Behavior::WithPrevious, false), ["the-", "final-", "-", "countdown"]);
        assert_eq!(cut(Behavior::WithNext, false), ["the", "-final", "-", "-countdown"]);
        assert_eq!(cut(Behavior::Contiguous, false), ["the", "-", "final", "--", "countdown"]);
        assert_eq!(cut(Behavior::Isolated, true), ["the", "-", "final", "-", "-", "countdown"]);
    }

    #[test]
    fn patterns_that_cannot_be_kept_are_refused() {
        for (pattern, wanted) in [
            (r"(?<=a)b", "look-around"),
            (r"a(?=b)", "look-around"),
            (r"\p{L}++", "possessive"),
            (r"[a]?+b", "possessive"),
            (r"\1", "backreferences"),
            (r"(a", "unclosed"),
            (r"(\p{L}{1000}){1000}", "bytes of memory"),
        ] {
            let cut =
                Cut::Pattern { pattern: Pattern::Regex(pattern.into()), behavior: Behavior::Isolated, invert: false };
            let message = Splitter::new(&[cut]).map(|_| ()).unwrap_err().to_string();
            assert!(message.contains(wanted) && message.contains(&format!("{pattern:?}")), "{message}");
        }
        assert!(!has_possessive(r"a+|+|[?+]|\?+|(?:b)+") && has_possessive(r"a{2}+"));
    }

    /// A pattern that looks to the end of the text at every place would take hours for a long one.
    #[test]
    fn patterns_that_look_far_ahead_are_stopped() {
        let splitter = Splitter::new(&[names::isolated(".*z|a")]).unwrap();
        let start = Instant::now();
        let text = "a".repeat(1 << 16);
        let stopped = split_by(&splitter.cutters, &text, start + Duration::from_millis(20), &mut |_| Ok(()));
        assert!(matches!(stopped, Err(TextError::SlowPattern { .. })), "{stopped:?}");
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }

    #[test]
    fn unknown_names_are_refused() {
        let message = names::named_rules("falcon").unwrap_err().to_string();
        assert!(message.contains("falcon") && message.contains("qwen2"), "{message}");
    }

    /// By a backtracking engine, lookahead and all, one pattern after the other.
    fn backtracked(patterns: &[&str], text: &str) -> Vec<String> {
        let mut pieces = vec![text.to_owned()];
        for pattern in patterns {
            let regex = tokenizers::utils::SysRegex::new(pattern).unwrap();
            let cut = |piece: &String| {
                let (mut parts, mut start) = (Vec::new(), 0);
                for (a, b) in regex.find_iter(piece) {
                    parts.extend([&piece[start..a], &piece[a..b]].map(str::to_owned));
                    start = b;
                }
                parts.push(piece[start..].to_owned());
                parts
            };
            pieces = pieces.iter().flat_map(cut).filter(|part| !part.is_empty()).collect();
        }
        pieces
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn equals_the_published_patterns(
            text in r"([ \t\n\r\u{a0}]{1,3}|[a-cA-C']{1,3}|[0-9]{1,4}|[!<é你ひǅ🙂/\u{301}，]|'(ll|S|re)){0,24}",
        ) {
            let names = [
                "gpt-2", "smollm", "qwen2", "llama-bpe", "tekken", "gpt-4o", "qwen35", "seed-coder", "viking", "deepseek-llm",
                "deepseek-coder", "deepseek-v3",
            ];
            for name in names {
                prop_assert_eq!(words(name, &text), backtracked(names::patterns(name).unwrap(), &text), "{}", name);
            }
        }

        #[test]
        fn nothing_is_lost(text in any::<String>()) {
            for name in ["gpt-2", "tekken", "deepseek-llm", "deepseek-v3"] {
                prop_assert_eq!(words(name, &text).concat(), text.as_str());
            }
            for behavior in [Behavior::WithPrevious, Behavior::WithNext, Behavior::Contiguous] {
                for invert in [false, true] {
                    let cut = Cut::Pattern { pattern: Pattern::Regex(r"\w+".into()), behavior, invert };
                    prop_assert_eq!(words_of(&[cut], &text).concat(), text.as_str());
                }
            }
        }
    }
}
