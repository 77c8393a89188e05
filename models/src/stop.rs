//! Stop strings over a stream of text.
//!
//! The match that is complete first wins; of several that end together, the longest. So the outcome does not depend on how
//! the text is cut into pieces. What may still become a stop string is withheld: the longest suffix that is a proper prefix
//! of one. The stop string itself and all that follows is dropped.

use serde_json::Value;
use thiserror::Error;

/// Stop strings that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StopError {
    /// Neither a string nor an array.
    #[error("stop must be a string or an array of strings; found {found}")]
    NotStrings {
        /// What was given, as JSON.
        found: String,
    },
    /// Too many.
    #[error("stop accepts at most {limit} sequences; found {found}")]
    TooMany {
        /// How many were given.
        found: usize,
        /// [`MAX_STOPS`].
        limit: usize,
    },
    /// An empty string, or an element that is no string.
    #[error("each stop sequence must be a non-empty string; found {found} at index {index}")]
    Empty {
        /// Which one, from 0.
        index: usize,
        /// What was given, as JSON.
        found: String,
    },
    /// Too long.
    #[error("stop sequences cannot exceed {limit} characters; found {found} at index {index}")]
    TooLong {
        /// Which one, from 0.
        index: usize,
        /// Its characters.
        found: usize,
        /// [`MAX_STOP_CHARS`].
        limit: usize,
    },
}

/// Stop strings of one request at most.
pub const MAX_STOPS: usize = 4;

/// Characters of a stop string at most.
pub const MAX_STOP_CHARS: usize = 256;

/// Checked stop strings: at most [`MAX_STOPS`], none empty, none twice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopStrings(Vec<String>);

impl StopStrings {
    /// Checks `stops` and removes duplicates, keeping the first of each.
    ///
    /// # Errors
    /// [`StopError::TooMany`] (counted before duplicates go), [`StopError::Empty`], [`StopError::TooLong`].
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Result<Self, StopError> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        if stops.len() > MAX_STOPS {
            return Err(StopError::TooMany { found: stops.len(), limit: MAX_STOPS });
        }
        let mut kept: Vec<String> = Vec::with_capacity(stops.len());
        for (index, stop) in stops.into_iter().enumerate() {
            let chars = stop.chars().count();
            if chars == 0 {
                return Err(StopError::Empty { index, found: "\"\"".to_owned() });
            }
            if chars > MAX_STOP_CHARS {
                return Err(StopError::TooLong { index, found: chars, limit: MAX_STOP_CHARS });
            }
            if !kept.contains(&stop) {
                kept.push(stop);
            }
        }
        Ok(Self(kept))
    }

    /// Reads the `stop` field of a request: null, a string, or an array of strings.
    ///
    /// # Errors
    /// As [`StopStrings::new`], and [`StopError::NotStrings`].
    pub fn from_json(value: &Value) -> Result<Self, StopError> {
        match value {
            Value::Null => Ok(Self::default()),
            Value::String(stop) => Self::new([stop.as_str()]),
            Value::Array(items) if items.len() > MAX_STOPS => {
                Err(StopError::TooMany { found: items.len(), limit: MAX_STOPS })
            }
            Value::Array(items) => {
                let text = |(index, item): (usize, &Value)| {
                    item.as_str()
                        .map(str::to_owned)
                        .ok_or_else(|| StopError::Empty { index, found: kind_of(item).to_owned() })
                };
                Self::new(items.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?)
            }
            other => Err(StopError::NotStrings { found: kind_of(other).to_owned() }),
        }
    }

    /// The strings.
    #[must_use]
    pub fn as_slice(&self) -> &[String] {
        &self.0
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Watches a stream of text for stop strings.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: StopStrings,
    held: String,
    matched: Option<usize>,
}

impl StopMatcher {
    /// A matcher at the start of a text.
    #[must_use]
    pub fn new(stops: StopStrings) -> Self {
        Self { stops, held: String::new(), matched: None }
    }

    /// Takes the next piece of text; returns what can be given out. Nothing after a match.
    pub fn push(&mut self, piece: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        if self.stops.is_empty() {
            return piece.to_owned();
        }
        self.held.push_str(piece);
        if let Some((start, stop)) = self.first_match() {
            self.matched = Some(stop);
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return text;
        }
        let kept = self.held.split_off(self.held.len() - self.withheld_bytes());
        std::mem::replace(&mut self.held, kept)
    }

    /// The end of the text: what was withheld and is no stop string after all.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that ended the text.
    #[must_use]
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|index| self.stops.0[index].as_str())
    }

    /// Start in `held` and index of the stop string that is complete first. Nothing that could belong to a match has left
    /// `held`, so the first occurrence there is the first in the text.
    fn first_match(&self) -> Option<(usize, usize)> {
        let stops = self.stops.0.iter().enumerate();
        stops
            .filter_map(|(index, stop)| self.held.find(stop.as_str()).map(|start| (start + stop.len(), start, index)))
            .min()
            .map(|(_, start, index)| (start, index))
    }

    fn withheld_bytes(&self) -> usize {
        let could_grow = |suffix: &str| self.stops.0.iter().any(|stop| stop.starts_with(suffix));
        let longest = self.stops.0.iter().map(|stop| stop.len() - 1).max().unwrap_or(0);
        (1..=longest.min(self.held.len()))
            .rev()
            .find(|&len| self.held.get(self.held.len() - len..).is_some_and(could_grow))
            .unwrap_or(0)
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn golden() -> Value {
        serde_json::from_str(include_str!("../tests/data/stop_vectors.json")).unwrap()
    }

    #[test]
    fn golden_normalization() {
        let golden = golden();
        for case in golden["normalize"].as_array().unwrap() {
            let stops = StopStrings::from_json(&case["in"]).unwrap();
            assert_eq!(Value::from(stops.as_slice()), case["out"]);
        }
        for case in golden["normalize_rejected"].as_array().unwrap() {
            assert!(StopStrings::from_json(case).is_err(), "{case}");
        }
        assert_eq!(golden["limits"]["sequences"], MAX_STOPS);
        assert_eq!(golden["limits"]["characters"], MAX_STOP_CHARS);
        assert_eq!(golden["limits"]["top_logprobs"], crate::logprobs::MAX_TOP_LOGPROBS);
        assert!(StopStrings::new(["ç".repeat(MAX_STOP_CHARS)]).is_ok());
    }

    #[test]
    fn golden_feeds() {
        for case in golden()["feeds"].as_array().unwrap() {
            let mut matcher = StopMatcher::new(StopStrings::from_json(&case["stops"]).unwrap());
            let pieces = case["pieces"].as_array().unwrap();
            let emitted: Vec<String> = pieces.iter().map(|piece| matcher.push(piece.as_str().unwrap())).collect();
            assert_eq!(Value::from(emitted), case["emitted"], "{case}");
            assert_eq!(matcher.flush(), case["flush"].as_str().unwrap(), "{case}");
            assert_eq!(matcher.matched(), case["matched"].as_str(), "{case}");
        }
    }

    #[test]
    fn the_match_that_ends_first_wins_whatever_the_pieces() {
        for pieces in [&["abcd"][..], &["abc", "d"], &["a", "b", "c", "d"]] {
            let mut matcher = StopMatcher::new(StopStrings::new(["abcd", "bc"]).unwrap());
            let text: String = pieces.iter().map(|piece| matcher.push(piece)).collect();
            assert_eq!((text.as_str(), matcher.matched()), ("a", Some("bc")));
        }
    }

    #[test]
    fn characters_are_never_cut() {
        let mut matcher = StopMatcher::new(StopStrings::new(["çé!"]).unwrap());
        assert_eq!(matcher.push("aç"), "a");
        assert_eq!(matcher.push("é"), "");
        assert_eq!(matcher.push("ç"), "çé");
        assert_eq!(matcher.flush(), "ç");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        /// A stream gives what the whole text gives, and that is the text before the first complete stop string.
        #[test]
        fn a_stream_gives_what_the_whole_gives(
            text in "[abç]{0,24}",
            stops in prop::collection::vec("[abç]{1,4}", 0..4),
            cuts in prop::collection::vec(0usize..24, 0..8),
        ) {
            let stops = StopStrings::new(stops).unwrap();
            let mut whole = StopMatcher::new(stops.clone());
            let mut expected = whole.push(&text);
            expected.push_str(&whole.flush());

            let chars: Vec<char> = text.chars().collect();
            let mut borders: Vec<usize> = cuts.into_iter().filter(|cut| *cut <= chars.len()).collect();
            borders.extend([0, chars.len()]);
            borders.sort_unstable();
            let mut stream = StopMatcher::new(stops.clone());
            let mut given = String::new();
            for pair in borders.windows(2) {
                given.push_str(&stream.push(&chars[pair[0]..pair[1]].iter().collect::<String>()));
                if let Some(stop) = stream.matched() {
                    prop_assert!(text[..given.len() + stop.len()].ends_with(stop));
                } else {
                    prop_assert!(stops.as_slice().iter().all(|stop| !given.contains(stop.as_str())));
                }
            }
            given.push_str(&stream.flush());
            prop_assert_eq!(&given, &expected);
            prop_assert_eq!(stream.matched(), whole.matched());

            let first_end = (0..=text.len())
                .filter(|end| text.is_char_boundary(*end))
                .find(|end| stops.as_slice().iter().any(|stop| text[..*end].ends_with(stop.as_str())));
            let by_definition = first_end.map(|end| {
                let longest = stops.as_slice().iter().filter(|stop| text[..end].ends_with(stop.as_str())).map(String::len).max();
                end - longest.unwrap_or(0)
            });
            prop_assert_eq!(given.len(), by_definition.unwrap_or(text.len()));
        }
    }
}
