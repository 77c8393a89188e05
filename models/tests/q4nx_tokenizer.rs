//! `tokenizer.json` as it is written into packed directories: the reference library reads it and gives the same ids as the
//! program's own tokenizer, and reading it back gives the same tokens, merges and ids.

use npuhal_models::q4nx::config::DirectoryConfig;
use npuhal_models::q4nx::tokenizer::{
    CONFIG_FILE, FILE, tokenizer_config_json, tokenizer_json, vocabulary as read_vocabulary,
};
use npuhal_models::vocabulary::{TokenKind, Vocabulary};
use npuhal_models::{ModelConfig, Specials, Tokenizer};
use proptest::prelude::*;
use std::str::FromStr;
use std::sync::LazyLock;

const PRE_TOKENIZERS: [&str; 5] = ["qwen2", "llama-bpe", "gpt-2", "smollm", "tekken"];

/// Byte-level alphabet of GPT-2.
fn byte_char(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&other| !printable(other)).count() as u32;
    char::from_u32(256 + rank).unwrap()
}

fn vocabulary(pre_tokenizer: &str) -> Vocabulary {
    let pairs = [
        ("Ġ", "t"),
        ("h", "e"),
        ("Ġt", "he"),
        ("l", "l"),
        ("he", "ll"),
        ("hell", "o"),
        ("1", "2"),
        ("Ġ", "Ġ"),
        ("Ã", "©"),
    ];
    let mut tokens: Vec<String> = (0..=255).map(|byte| byte_char(byte).to_string()).collect();
    tokens.extend(pairs.map(|(left, right)| format!("{left}{right}")));
    let mut kinds = vec![TokenKind::Normal; tokens.len()];
    for (text, kind) in [
        ("<|end|>", TokenKind::Control),
        ("<|start|>", TokenKind::Control),
        ("<tool>", TokenKind::UserDefined),
        ("[PAD1]", TokenKind::Unused),
    ] {
        tokens.push(text.to_owned());
        kinds.push(kind);
    }
    let id = |text: &str| tokens.iter().position(|token| token == text).unwrap() as u32;
    Vocabulary {
        model: "gpt2".to_owned(),
        pre_tokenizer: pre_tokenizer.to_owned(),
        merges: pairs.map(|(left, right)| format!("{left} {right}")).to_vec(),
        bos: Some(id("<|start|>")),
        eos: vec![id("<|end|>")],
        padding: Some(id("<|end|>")),
        chat_template: Some("{{ messages }}".to_owned()),
        tokens,
        kinds,
        ..Vocabulary::default()
    }
}

fn reference(vocabulary: &Vocabulary) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_str(&tokenizer_json(vocabulary).unwrap()).unwrap()
}

/// The program's tokenizer and the reference library's, by pre-tokenizer.
static BOTH: LazyLock<Vec<(&str, Tokenizer, tokenizers::Tokenizer)>> = LazyLock::new(|| {
    let both = |name| {
        let vocabulary = vocabulary(name);
        (name, Tokenizer::from_vocabulary(&vocabulary).unwrap(), reference(&vocabulary))
    };
    PRE_TOKENIZERS.into_iter().map(both).collect()
});

#[test]
fn it_reads_back_with_the_same_tokens_and_ids() {
    for name in PRE_TOKENIZERS {
        let written = vocabulary(name);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), tokenizer_json(&written).unwrap()).unwrap();
        std::fs::write(folder.path().join(CONFIG_FILE), tokenizer_config_json(&written)).unwrap();
        let mut read = read_vocabulary(folder.path(), &config(&written)).unwrap();
        let own = Tokenizer::from_vocabulary(&written).unwrap();
        let again = Tokenizer::from_vocabulary(&read).unwrap();
        for text in ["the hello 1212  é\n\n<tool>'ll [PAD1]", "Hello<|end|> the\t12345", "  <|start|>你🙂 DON'T"] {
            for specials in [Specials::Parse, Specials::Plain] {
                assert_eq!(
                    again.encode(text, specials).unwrap(),
                    own.encode(text, specials).unwrap(),
                    "{name}: {text:?}"
                );
            }
        }
        // A token that is never used is written as one that nothing makes.
        let unused = read.tokens.iter().position(|text| text == "[PAD1]").unwrap();
        assert_eq!(read.kinds[unused], TokenKind::Normal);
        read.kinds[unused] = TokenKind::Unused;
        assert_eq!(
            (&read.tokens, &read.kinds, &read.merges),
            (&written.tokens, &written.kinds, &written.merges),
            "{name}"
        );
        assert_eq!((read.bos, &read.eos, read.padding), (written.bos, &written.eos, written.padding), "{name}");
        assert_eq!(read.chat_template, written.chat_template);
    }
}

fn config(vocabulary: &Vocabulary) -> DirectoryConfig {
    let rope = npuhal_models::config::Rope {
        theta: 1e6,
        dims: 64,
        pairing: npuhal_models::config::RopePairing::Halves,
        scaling: npuhal_models::config::RopeScaling::None,
    };
    let model = ModelConfig {
        model_type: "qwen3".to_owned(),
        name: String::new(),
        hidden_size: 64,
        layers: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 64,
        intermediate_size: 64,
        vocab_size: vocabulary.tokens.len(),
        context_length: 64,
        rms_norm_eps: 1e-6,
        rope,
        qkv_bias: false,
        qk_norm: true,
        tied_head: false,
        features: npuhal_models::config::DecoderFeatures::default(),
    };
    DirectoryConfig { model, bos: vocabulary.bos, eos: vocabulary.eos.clone() }
}

#[test]
fn what_cannot_be_written_is_said() {
    let mut other = vocabulary("qwen2");
    other.model = "llama".to_owned();
    assert!(tokenizer_json(&other).unwrap_err().contains("\"llama\""));
    let other = vocabulary("no-such");
    assert!(tokenizer_json(&other).unwrap_err().contains("no-such"));
    let mut other = vocabulary("qwen2");
    other.tokens[7] = "a".to_owned();
    assert!(tokenizer_json(&other).unwrap_err().contains("two tokens"));
    let mut other = vocabulary("qwen2");
    other.merges.push("ab".to_owned());
    assert!(tokenizer_json(&other).unwrap_err().contains("no pair"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_reference_library_gives_the_same_ids(
        text in r"([ \t\n\r]{1,3}|hello|the| the|[a-h']{1,3}|[0-9]{1,4}|<\|end\|>|<tool>|\[PAD1\]|[!<é你🙂]|'(ll|S)){0,16}",
    ) {
        for (name, own, reference) in &*BOTH {
            let wanted = reference.encode(text.as_str(), false).unwrap();
            prop_assert_eq!(own.encode(&text, Specials::Parse).unwrap(), wanted.get_ids(), "{}", name);
        }
    }
}
