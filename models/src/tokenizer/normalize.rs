//! Changes of text before it is cut into words.

use crate::text_rules::{Normalizer, Prepend};
use std::borrow::Cow;
use unicode_normalization_alignments::UnicodeNormalization;

/// `section` after `steps`; `first` where it is the start of the text.
pub(super) fn normalize<'t>(steps: &[Normalizer], section: &'t str, first: bool) -> Cow<'t, str> {
    let mut text = Cow::Borrowed(section);
    for step in steps {
        if text.is_empty() {
            break;
        }
        if let Some(changed) = apply(step, &text, first) {
            text = Cow::Owned(changed);
        }
    }
    text
}

/// `None` where nothing changes.
fn apply(step: &Normalizer, text: &str, first: bool) -> Option<String> {
    // Forms C and D leave ASCII alone, and so do KC and KD.
    let unicode = |form: fn(&str) -> String| (!text.is_ascii()).then(|| form(text));
    match step {
        Normalizer::Nfc => unicode(|text| text.nfc().map(|(c, _)| c).collect()),
        Normalizer::Nfd => unicode(|text| text.nfd().map(|(c, _)| c).collect()),
        Normalizer::Nfkc => unicode(|text| text.nfkc().map(|(c, _)| c).collect()),
        Normalizer::Nfkd => unicode(|text| text.nfkd().map(|(c, _)| c).collect()),
        Normalizer::Prepend(prefix) => Some([prefix.as_str(), text].concat()),
        Normalizer::Replace { from, to } => text.contains(from.as_str()).then(|| text.replace(from.as_str(), to)),
        Normalizer::Metaspace { mark, prepend } => {
            let mut mark_bytes = [0; 4];
            let mark_text: &str = mark.encode_utf8(&mut mark_bytes);
            let marked = text.replace(' ', mark_text);
            let wanted = match prepend {
                Prepend::Never => false,
                Prepend::First => first,
                Prepend::Always => true,
            };
            Some(if wanted && !marked.starts_with(*mark) { [mark_text, &marked].concat() } else { marked })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_each_other() {
        let steps = [
            Normalizer::Nfc,
            Normalizer::Prepend("▁".into()),
            Normalizer::Replace { from: " ".into(), to: "▁".into() },
        ];
        assert_eq!(normalize(&steps, "e\u{301} a", true), "▁é▁a");
        assert_eq!(normalize(&steps, "", true), "");
        assert_eq!(normalize(&[Normalizer::Nfkc], "ﬁ①", true), "fi1");
        assert_eq!(normalize(&[Normalizer::Nfd], "é", true), "e\u{301}");
        assert_eq!(normalize(&[Normalizer::Nfkd], "ﬁé", true), "fie\u{301}");
    }

    #[test]
    fn space_marks_go_in_front_where_they_are_wanted() {
        let marked =
            |prepend, text, first| normalize(&[Normalizer::Metaspace { mark: '▁', prepend }], text, first).into_owned();
        assert_eq!(marked(Prepend::Always, "a b", false), "▁a▁b");
        assert_eq!(marked(Prepend::Always, " a", false), "▁a");
        assert_eq!(marked(Prepend::First, "a", false), "a");
        assert_eq!(marked(Prepend::First, "a", true), "▁a");
        assert_eq!(marked(Prepend::Never, "a ", true), "a▁");
    }
}
