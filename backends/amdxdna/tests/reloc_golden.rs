//! Images patched by a reference client, reproduced from template, relocations and values.

mod common;

use common::{data, json, read, sha256, shared_golden, unhex};
use npuhal_amdxdna::format::elf::Program;
use npuhal_amdxdna::format::reloc::PatchTable;
use serde_json::Value;

/// Largest section that is expanded here.
const LIMIT: usize = 1 << 20;

/// Patches one image as recorded and compares its digest.
fn check(program: &Program, case: &Value) {
    let name = case["section"].as_str().unwrap();
    let (index, _) = program.elf().find(name).unwrap();
    let template = program.content(index, LIMIT).unwrap();
    let table = PatchTable::of_section(program, index, &template).unwrap();
    let values = case["values"].as_object().unwrap();
    assert_eq!(values.len(), table.symbols().len(), "{case}");
    let value = |name: &str| u64::from_str_radix(values[name].as_str().unwrap().trim_start_matches("0x"), 16).unwrap();
    let inserted: Vec<_> = table.symbols().iter().map(|symbol| value(&symbol.name)).collect();
    let image = table.patched(&template, &inserted).unwrap();
    assert_eq!(image.len() as u64, case["size"].as_u64().unwrap(), "{case}");
    assert_eq!(sha256(&image), case["sha256"].as_str().unwrap(), "{case}");
    // The same from an image that other values were patched into before.
    let mut image = table.patched(&template, &vec![0x1234_5678_9ABC & !3; inserted.len()]).unwrap();
    table.apply(&inserted, &mut image, &mut Vec::new()).unwrap();
    assert_eq!(sha256(&image), case["sha256"].as_str().unwrap(), "{case}");
}

fn cases(synthetic: bool) -> Vec<Value> {
    let all = json(data("patched_images.json"));
    let all = all.as_array().unwrap();
    assert_eq!(all.len(), 62);
    all.iter().filter(|c| c["elf"].as_str().unwrap().starts_with("reloc_") == synthetic).cloned().collect()
}

#[test]
fn images_of_synthetic_files_are_reproduced() {
    let inputs = json(data("inputs.json"));
    let cases = cases(true);
    assert_eq!(cases.len(), 20);
    for case in cases {
        let file = &inputs[case["elf"].as_str().unwrap()];
        let bytes = unhex(file["hex"].as_str().unwrap());
        check(&Program::parse(&bytes).unwrap(), &case);
    }
}

#[test]
fn another_context_length_rewrites_the_words_that_depend_on_it() {
    let Some(folder) = shared_golden("another_context_length", "xdna2/derived") else { return };
    let [(old, old_template), (new, new_template)] = ["full_none_ctx1.elf", "full_none_ctx17.elf"].map(|name| {
        let program = Program::parse(&read(folder.join(name))).unwrap();
        let (index, _) = program.elf().find(".ctrltext.0").unwrap();
        let template = program.content(index, LIMIT).unwrap().into_owned();
        (PatchTable::of_section(&program, index, &template).unwrap(), template)
    });
    let values = [0x7E11_0000_0000, 0x7E12_0000_0000, 0x7E13_0000_0000, 0x7E14_0000_0000, 0x7E15_0000_0000];
    let mut image = old.patched(&old_template, &values).unwrap();
    let rebind = new.rebind_from(&old, &old_template, &new_template).unwrap();
    // 8 context lengths in core memory, 4 offsets in DDR_PATCH operations, 4 lengths of key/value reads.
    assert_eq!(rebind.word_count(), 16);
    let mut changed = Vec::new();
    new.rebind(&rebind, &values, &mut image, &mut changed).unwrap();
    // The offsets reach the descriptors through the addends: 4 more words.
    assert_eq!(changed.iter().map(|range| range.len()).sum::<usize>(), 4 * 20);
    assert!(image == new.patched(&new_template, &values).unwrap());
}

#[test]
fn images_of_captured_code_are_reproduced() {
    let Some(folder) = shared_golden("images_of_captured_code", "xdna2/derived") else { return };
    let cases = cases(false);
    assert_eq!(cases.len(), 42);
    for case in cases {
        let bytes = read(folder.join(case["elf"].as_str().unwrap()));
        check(&Program::parse(&bytes).unwrap(), &case);
    }
}
