//! Compiled kernels: which are here, for which models.

use super::{Check, List, Remedy, Status};
use crate::kernels::KernelState;
use npuhal_models::ModelSource;
use npuhal_models::q4nx::cache::PackCache;
use npuhal_models::q4nx::directory::{KERNELS, is_model};
use npuhal_xdna2::kernels::KernelTarget;
use std::fs;
use std::path::{Path, PathBuf};

/// Kernels are looked for this deep below a folder, and no further than so many entries.
const DEPTH: usize = 3;
const ENTRIES: usize = 10_000;

/// What was found below the folders.
#[derive(Debug, Default)]
struct Found {
    /// Packed models.
    packed: Vec<PathBuf>,
    /// Files that belong to no packed model.
    loose: Vec<PathBuf>,
}

/// Kernels of packed models in the models folder and, on this machine, in the cache of packed models; then designs that no
/// packed model has.
pub(super) fn examine(list: &mut List, models: &Path, with_cache: bool) {
    let cache = with_cache.then(PackCache::locate).and_then(Result::ok);
    let mut found = Found::default();
    let mut budget = ENTRIES;
    find(models, DEPTH, &mut budget, &mut found);
    if let Some(cache) = cache {
        find(cache.folder(), DEPTH, &mut budget, &mut found);
    }
    if found.packed.is_empty() && found.loose.is_empty() {
        list.not_tried.push(
            "NPU kernels: no packed model (`npuhal pack`) is here, and no compiled design for any model".to_owned(),
        );
        return;
    }
    found.packed.sort();
    found.loose.sort();
    let mut check = Check::new("kernels");
    found.packed.iter().for_each(|directory| of_model(&mut check, directory));
    if !found.loose.is_empty() {
        for file in &found.loose {
            let model = file.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
            let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            check.found.push(format!("{name} for {}", model.unwrap_or_else(|| "?".to_owned())));
        }
        let issue =
            "compiled designs are here that lie beside no packed model: this version has no route that uses them";
        check.add_issue(Status::Warn, issue, [Remedy::advice("nothing to mend: models run on the CPU")]);
    }
    list.checks.push(check);
}

fn of_model(check: &mut Check, directory: &Path) {
    let shown = directory.display();
    let model = match ModelSource::open(directory) {
        Ok(model) => model,
        Err(error) => {
            check.add_issue(Status::Warn, error.to_string(), [Remedy::advice("pack the model again: npuhal pack")]);
            return;
        }
    };
    match KernelState::of(directory, &model) {
        KernelState::Unusable(reason) => {
            let remedy =
                Remedy::advice("put kernels made for this model into its npu folder, or remove those that are there");
            check.add_issue(Status::Warn, format!("{shown}: {reason}"), [remedy]);
        }
        state @ KernelState::Fits { target: KernelTarget::Hardware, .. } => {
            check.found.push(format!("{shown}: {state}; nobody has run npuhal with such kernels yet"));
        }
        state => check.found.push(format!("{shown}: {state}")),
    }
}

fn find(folder: &Path, depth: usize, budget: &mut usize, found: &mut Found) {
    let is_packed = is_model(folder);
    if is_packed {
        found.packed.push(folder.to_owned());
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if *budget == 0 {
            return;
        }
        *budget -= 1;
        let path = entry.path();
        match entry.file_type() {
            Ok(_) if is_packed && entry.file_name() == KERNELS => {}
            Ok(kind) if kind.is_dir() && depth > 0 => find(&path, depth - 1, budget, found),
            Ok(kind) if kind.is_file() && path.extension().is_some_and(|e| e == "xclbin" || e == "elf") => {
                found.loose.push(path);
            }
            _ => {}
        }
    }
}
