//! `npuhal rm`: removes models from the models folder.

use crate::Host;
use crate::args::RmArgs;
use crate::error::CliError;
use crate::terminal::bytes_text;
use npuhal_models::{Catalogue, Store};

pub(crate) fn rm(host: &Host, args: &RmArgs) -> Result<(), CliError> {
    let catalogue = Catalogue::builtin();
    let store = Store::locate(host.global.models_dir.as_deref())?;
    for name in &args.models {
        let freed_bytes = store.remove(catalogue, name)?;
        host.voice.note(format_args!("removed {name} ({})", bytes_text(freed_bytes)));
    }
    Ok(())
}
