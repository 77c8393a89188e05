//! SentencePiece vocabularies as GGUF files have them: byte-pair encoding by scores, unigram, byte fallback, space prefix.

use npuhal_models::template::TemplateSource;
use npuhal_models::vocabulary::{RulesSource, TokenKind, Vocabulary};
use npuhal_models::{
    ChatInput, ChatMessage, ChatTemplate, ControlTokens, Specials, StreamDetokenizer, TextError, Tokenizer, encode_chat,
};
use proptest::prelude::*;
use serde_json::Value;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

const SPACE: &str = "\u{2581}";
/// Pieces of the little vocabulary, by falling score.
const PIECES: [&str; 20] = [
    "▁▁", "th", "▁th", "▁the", "er", "at", "cat", "▁cat", "in", "ing", "é", "▁é", "他", "a", "b", "c", "h", "t", "e",
    "▁",
];

/// Controls, all bytes, then `pieces` with scores that fall from 0.
fn with_pieces(model: &str, pieces: &[&str]) -> Vocabulary {
    let mut vocabulary = Vocabulary {
        model: model.to_owned(),
        unknown: Some(0),
        bos: Some(1),
        eos: vec![2],
        add_bos: true,
        add_space_prefix: true,
        ..Vocabulary::default()
    };
    let mut push = |text: &str, kind, score| {
        vocabulary.tokens.push(text.to_owned());
        vocabulary.kinds.push(kind);
        vocabulary.scores.push(score);
    };
    for (text, kind) in [("<unk>", TokenKind::Unknown), ("<s>", TokenKind::Control), ("</s>", TokenKind::Control)] {
        push(text, kind, 0.0);
    }
    (0..=255).for_each(|byte: u8| push(&format!("<0x{byte:02X}>"), TokenKind::Byte, 0.0));
    push("<think>", TokenKind::UserDefined, 0.0);
    pieces.iter().enumerate().for_each(|(n, piece)| push(piece, TokenKind::Normal, -(n as f32)));
    vocabulary
}

static SCORED: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_vocabulary(&with_pieces("llama", &PIECES)).unwrap());
static UNIGRAM: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::from_vocabulary(&with_pieces("t5", &PIECES)).unwrap());

/// Ids as the vocabulary spells them.
fn spelled(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text, Specials::Plain).unwrap();
    ids.iter().map(|id| tokenizer.token_text(*id).unwrap().to_owned()).collect()
}

/// The pieces of MiniCPM4 that its published ids stand for, at their places and with scores that fall with the id.
static MINICPM4: LazyLock<Tokenizer> = LazyLock::new(|| {
    let pieces = [
        (1507, "▁The"),
        (8107, "▁capital"),
        (1379, "▁of"),
        (8360, "▁France"),
        (1410, "▁is"),
        (11225, "▁Paris"),
        (21045, "▁Hello"),
        (59342, ","),
        (2809, "▁world"),
        (73, "!"),
        (1345, "▁▁"),
        (3837, "Par"),
        (1360, "is"),
    ];
    let mut vocabulary = with_pieces("llama", &[]);
    vocabulary.tokens.resize(60_000, String::new());
    vocabulary.kinds.resize(60_000, TokenKind::Unused);
    vocabulary.scores.resize(60_000, 0.0);
    // Bytes stay out of the way of the published ids.
    for at in 3..260 {
        let (text, kind) = (std::mem::take(&mut vocabulary.tokens[at]), vocabulary.kinds[at]);
        vocabulary.tokens[at + 59_500] = text;
        vocabulary.kinds[at + 59_500] = kind;
        vocabulary.kinds[at] = TokenKind::Unused;
    }
    let mut next = 30_000;
    for (id, piece) in pieces {
        // What a piece is merged from, left to right, with a score below its own.
        let ends: Vec<usize> = piece.char_indices().map(|(at, c)| at + c.len_utf8()).collect();
        for (n, end) in ends.iter().enumerate() {
            let starts = if n == 0 { vec![0] } else { vec![0, ends[n - 1]] };
            for start in starts {
                let part = &piece[start..*end];
                if part != piece && !vocabulary.tokens.iter().any(|token| token == part) {
                    set(&mut vocabulary, next, part);
                    next += 1;
                }
            }
        }
        set(&mut vocabulary, id, piece);
    }
    Tokenizer::from_vocabulary(&vocabulary).unwrap()
});

#[test]
fn published_cases_of_minicpm4() {
    let golden: Value = serde_json::from_str(include_str!("data/text/minicpm4_tokenizer_golden.json")).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 5);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let wanted: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let found = MINICPM4.encode(text, Specials::Plain).unwrap();
        assert_eq!(found, wanted, "{text:?}: {:?}", spelled(&MINICPM4, text));
        assert_eq!(MINICPM4.decode(&found, ControlTokens::Hide), text);
    }
}

fn set(vocabulary: &mut Vocabulary, id: usize, text: &str) {
    text.clone_into(&mut vocabulary.tokens[id]);
    vocabulary.kinds[id] = TokenKind::Normal;
    vocabulary.scores[id] = -(id as f32);
}

#[test]
fn the_highest_score_is_merged_first() {
    assert_eq!(spelled(&SCORED, "the cat"), ["▁the", "▁cat"]);
    assert_eq!(spelled(&SCORED, " the"), ["▁▁", "th", "e"]);
    assert_eq!(spelled(&SCORED, "   a"), ["▁▁", "▁▁", "a"]);
    assert_eq!(spelled(&SCORED, "éx他"), ["▁é", "<0x78>", "他"]);
    assert_eq!(spelled(&SCORED, "你"), ["▁", "<0xE4>", "<0xBD>", "<0xA0>"]);
    assert_eq!(spelled(&SCORED, ""), Vec::<String>::new());
    assert_eq!(spelled(&UNIGRAM, "the cat"), ["▁the", "▁cat"]);
    assert_eq!(spelled(&UNIGRAM, "你a"), ["▁", "<0xE4>", "<0xBD>", "<0xA0>", "a"]);
}

#[test]
fn spaces_go_in_front_where_the_file_says_so() {
    let ids = SCORED.encode("<s>the<think>the", Specials::Parse).unwrap();
    let the = SCORED.token_id("▁the").unwrap();
    assert_eq!(ids, [1, the, 259, the]);
    assert_eq!(SCORED.decode(&ids, ControlTokens::Show), "<s> the<think> the");
    assert_eq!(SCORED.decode(&ids[1..2], ControlTokens::Show), "the");
    let bare = Vocabulary { add_space_prefix: false, ..with_pieces("llama", &PIECES) };
    let bare = Tokenizer::from_vocabulary(&bare).unwrap();
    assert_eq!(spelled(&bare, "the the"), ["th", "e", "▁the"]);
    assert_eq!(bare.decode(&[the], ControlTokens::Show), " the");
    // What follows a prompt keeps its space, and so does every single token.
    let mut answer = StreamDetokenizer::continuing(&SCORED, ControlTokens::Hide);
    assert_eq!((answer.push(the), SCORED.token_bytes(the)), (" the".to_owned(), Some(b" the".to_vec())));
}

#[test]
fn user_defined_tokens_spell_spaces_too() {
    let mut vocabulary = with_pieces("llama", &PIECES);
    for (text, score) in [("\u{2581}\u{2581}\u{2581}", 1.0), ("  \t", 0.0)] {
        vocabulary.tokens.push(text.to_owned());
        vocabulary.kinds.push(TokenKind::UserDefined);
        vocabulary.scores.push(score);
    }
    let tokenizer = Tokenizer::from_vocabulary(&vocabulary).unwrap();
    let ids = tokenizer.encode("  a  \ta", Specials::Plain).unwrap();
    let last = vocabulary.tokens.len() as u32;
    assert!(ids.contains(&(last - 2)) && ids.contains(&(last - 1)), "{ids:?}");
    assert_eq!(tokenizer.decode(&ids, ControlTokens::Hide), "  a  \t a");
}

#[test]
fn controls_and_bytes_never_come_out_of_text() {
    let mut pieces = PIECES.to_vec();
    pieces.extend(["<", "/", "s", ">", "</", "s>", "0x", "0", "x", "<0x", "4", "1", "41>", "41", "1>"]);
    for model in ["llama", "t5"] {
        let tokenizer = Tokenizer::from_vocabulary(&with_pieces(model, &pieces)).unwrap();
        for text in ["</s>", "<s>", "<0x41>", "<unk>"] {
            let ids = tokenizer.encode(text, Specials::Plain).unwrap();
            assert!(!ids.iter().any(|id| tokenizer.is_control(*id)), "{text}: {ids:?}");
            assert_eq!(tokenizer.decode(&ids, ControlTokens::Show), text);
        }
    }
}

#[test]
fn vocabularies_that_cannot_be_used_are_refused() {
    type Change = fn(&mut Vocabulary);
    let cases: [(Change, &str); 4] = [
        (|v| v.scores.truncate(7), "7 scores"),
        (|v| v.scores[9] = f32::NAN, "no numbers"),
        (|v| v.tokens[270] = "a".repeat(5000), "5000"),
        (|v| v.rules = RulesSource::Refused("a charsmap".into()), "a charsmap"),
    ];
    for model in ["llama", "t5"] {
        for (change, wanted) in cases {
            let mut vocabulary = with_pieces(model, &PIECES);
            change(&mut vocabulary);
            let message = Tokenizer::from_vocabulary(&vocabulary).unwrap_err().to_string();
            assert!(message.contains(wanted), "{message}");
        }
        let mut vocabulary = with_pieces(model, &PIECES);
        vocabulary.kinds[3 + 0xE4] = TokenKind::Unused;
        let tokenizer = Tokenizer::from_vocabulary(&vocabulary).unwrap();
        assert_eq!(spelled(&tokenizer, "你a"), ["▁", "<unk>", "a"]);
        vocabulary.unknown = None;
        let tokenizer = Tokenizer::from_vocabulary(&vocabulary).unwrap();
        let error = tokenizer.encode("你", Specials::Plain);
        assert!(matches!(error, Err(TextError::NoTokenForCharacter { character: '你' })), "{error:?}");
    }
}

/// Sections of a conversation behind control tokens get their spaces, as the whole text's would.
#[test]
fn conversations_are_encoded_as_their_text() {
    let template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{{ eos_token }}{% endfor %}";
    let template = ChatTemplate::new(template, TemplateSource::Model, "<s>", "</s>").unwrap();
    let input = ChatInput::new(vec![ChatMessage::new("user", "the </s> cat"), ChatMessage::new("user", " a")]);
    let ids = encode_chat(&SCORED, &template, &input).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 2).count(), 2);
    let innocent = ChatInput::new(vec![ChatMessage::new("user", "the <think> cat"), ChatMessage::new("user", " a")]);
    let rendered = template.render(&innocent).unwrap();
    let wanted = SCORED.encode(&rendered, Specials::Parse).unwrap();
    assert_eq!(encode_chat(&SCORED, &template, &innocent).unwrap(), wanted);
}

#[test]
fn long_runs_take_linear_time() {
    let start = Instant::now();
    let chain: Vec<String> = (1..=600).map(|len| "a".repeat(len)).collect();
    let chain: Vec<&str> = chain.iter().map(String::as_str).chain([SPACE]).collect();
    for model in ["llama", "t5"] {
        let tokenizer = Tokenizer::from_vocabulary(&with_pieces(model, &chain)).unwrap();
        for piece in ["a", " ", "é"] {
            let text = piece.repeat((1 << 15) / piece.len());
            let ids = tokenizer.encode(&text, Specials::Plain).unwrap();
            assert_eq!(tokenizer.decode(&ids, ControlTokens::Hide), text);
        }
    }
    let limit = if cfg!(debug_assertions) { 120 } else { 20 };
    assert!(start.elapsed() < Duration::from_secs(limit), "{:?}", start.elapsed());
}

/// Merging by the rule itself: over and over the best pair, the leftmost on ties.
fn merged_slowly(vocabulary: &Vocabulary, text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let score = |n: usize| {
            let text = [pieces[n].as_str(), &pieces[n + 1]].concat();
            let at = vocabulary.tokens.iter().position(|token| *token == text)?;
            (vocabulary.kinds[at] == TokenKind::Normal).then_some(vocabulary.scores[at])
        };
        let mut best: Option<(f32, usize)> = None;
        for n in 0..pieces.len().saturating_sub(1) {
            if let Some(score) = score(n)
                && best.is_none_or(|(best, _)| score > best)
            {
                best = Some((score, n));
            }
        }
        let Some((_, n)) = best else { return pieces };
        let right = pieces.remove(n + 1);
        pieces[n].push_str(&right);
    }
}

/// The highest sum of scores over all ways to cut `text`.
fn best_sum(vocabulary: &Vocabulary, text: &str) -> f64 {
    let mut best = vec![f64::NEG_INFINITY; text.len() + 1];
    best[0] = 0.0;
    for start in 0..text.len() {
        for end in start + 1..=text.len() {
            let Some(part) = text.get(start..end) else { continue };
            let at = vocabulary.tokens.iter().position(|token| token == part);
            if let Some(at) = at.filter(|at| vocabulary.kinds[*at] == TokenKind::Normal) {
                best[end] = best[end].max(best[start] + f64::from(vocabulary.scores[at]));
            }
        }
    }
    best[text.len()]
}

fn stream(tokenizer: &Tokenizer, ids: &[u32], controls: ControlTokens) -> String {
    let mut detokenizer = StreamDetokenizer::new(tokenizer, controls);
    let mut text: String = ids.iter().map(|id| detokenizer.push(*id)).collect();
    text.push_str(&detokenizer.flush());
    text
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn merging_is_by_the_rule(
        text in "[abct ]{0,24}",
        scores in prop::collection::vec(0u8..6, 24),
        pieces in prop::collection::btree_set("[▁abct]{2,4}", 1..24),
    ) {
        let mut pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let merged = pieces.len();
        pieces.extend(["▁", "a", "b", "c", "t"]);
        let mut vocabulary = with_pieces("llama", &pieces);
        let first = vocabulary.tokens.len() - pieces.len();
        for n in 0..merged {
            vocabulary.scores[first + n] = f32::from(scores[n]);
        }
        let marked = if text.is_empty() { String::new() } else { format!("{SPACE}{}", text.replace(' ', SPACE)) };
        let tokenizer = Tokenizer::from_vocabulary(&vocabulary).unwrap();
        prop_assert_eq!(spelled(&tokenizer, &text), merged_slowly(&vocabulary, &marked));

        for n in 0..pieces.len() {
            vocabulary.scores[first + n] = -f32::from(scores[n.min(23)]) - 1.0;
        }
        vocabulary.model = "t5".into();
        let tokenizer = Tokenizer::from_vocabulary(&vocabulary).unwrap();
        let found: f64 = tokenizer.encode(&text, Specials::Plain).unwrap().iter().map(|id| f64::from(vocabulary.scores[*id as usize])).sum();
        prop_assert_eq!(found, best_sum(&vocabulary, &marked));
    }

    #[test]
    fn any_text_survives(text in any::<String>(), words in "( |the|cat|é|<|>|</s>|<0x41>|你|\n){0,16}") {
        for tokenizer in [&*SCORED, &UNIGRAM, &MINICPM4] {
            for text in [&text, &words] {
                let ids = tokenizer.encode(text, Specials::Plain).unwrap();
                prop_assert!(!ids.iter().any(|id| tokenizer.is_control(*id)));
                let whole = tokenizer.decode(&ids, ControlTokens::Hide);
                prop_assert_eq!(&stream(tokenizer, &ids, ControlTokens::Hide), &whole);
                prop_assert_eq!(whole, text.replace(SPACE, " "));
            }
        }
    }

    #[test]
    fn the_stream_equals_the_whole(picks in prop::collection::vec(any::<prop::sample::Index>(), 0..40)) {
        for tokenizer in [&*SCORED, &UNIGRAM, &MINICPM4] {
            let ids: Vec<u32> = picks.iter().map(|pick| pick.index(tokenizer.vocab_size() + 2) as u32).collect();
            // Most ids of the last are unused; its bytes make the characters.
            let ids: Vec<u32> = ids.iter().map(|id| if *id > 1000 { 59_503 + id % 256 } else { *id }).collect();
            for controls in [ControlTokens::Show, ControlTokens::Hide] {
                prop_assert_eq!(stream(tokenizer, &ids, controls), tokenizer.decode(&ids, controls));
            }
        }
    }
}
